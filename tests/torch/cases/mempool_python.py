# A torch.cuda.MemPool whose allocator is written in Python, and so needs Python's lock: its memory comes
# from there, in segments, and goes back when nobody uses it any more, also where the pool has gone before
# its tensors.
#: attach plain install native run
#: memory 512
#: torch 2.9
import ctypes

import torch
from case import MIB, pattern, raises

runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
sizes, taken, most = {}, [], 1 << 40


# Python's lock is taken here, as it is by allocators that are written in Python.
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
def allocate(size, device, stream):
    address = ctypes.c_void_p()
    if size > most or runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) != 0:
        return None
    sizes[address.value] = size
    return address.value


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
def free(address, size, device, stream):
    assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
    taken.append(sizes.pop(address) == size)


addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, free)]
allocator = torch._C._cuda_customAllocator(*addresses)


def inside(tensor):
    start = tensor.data_ptr()
    return any(it <= start and start + tensor.nbytes <= it + size for it, size in sizes.items())


def empty(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def tensor_of_a_pool_that_goes():
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool):
        return pattern(16 * MIB).cuda()


outside = empty(4)
x = tensor_of_a_pool_that_goes()
assert list(sizes.values()) == [16 * MIB] and inside(x) and not inside(outside)
torch.cuda.empty_cache()
assert torch.equal(x.cpu(), pattern(16 * MIB)) and not taken
del x
torch.cuda.empty_cache()
assert not sizes and taken == [True]

# What is freed in the pool is used again there, and nowhere else; what it holds is counted.
pool = torch.cuda.MemPool(allocator)
before = torch.cuda.memory_reserved()
with torch.cuda.use_mem_pool(pool):
    small = [torch.empty(100, device="cuda") for _ in range(3)]
    large = empty(3)
    assert sorted(sizes.values()) == [2 * MIB, 20 * MIB]
    assert all(inside(it) for it in (*small, large))
    where = large.data_ptr()
    del large
    again = empty(3)
    assert again.data_ptr() == where
assert torch.cuda.memory_reserved() == before + 22 * MIB
segments = pool.snapshot()
assert sorted(it["total_size"] for it in segments) == [2 * MIB, 20 * MIB]
assert not any(it["is_expandable"] for it in segments)
del again
others = [empty(1) for _ in range(30)]
assert not any(inside(it) for it in others)
torch.cuda.empty_cache()
assert len(sizes) == 2

# Streams keep apart in it, too.
side = torch.cuda.Stream()
with torch.cuda.use_mem_pool(pool):
    used = empty(18)
    used.record_stream(side)
    del used
    with torch.cuda.stream(side):
        mine = empty(18)
    assert inside(mine)

# No more memory there is out of memory, and no reason to look elsewhere.
most = 0
with torch.cuda.use_mem_pool(pool):
    raises(torch.OutOfMemoryError, lambda: empty(64))
    kept = empty(1)
most = 1 << 40
with torch.cuda.use_mem_pool(pool):
    assert inside(empty(64))
del small, mine, kept, pool
torch.cuda.empty_cache()
assert not sizes and all(taken) and len(taken) >= 4, (sizes, taken)
