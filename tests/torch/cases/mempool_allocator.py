# torch.cuda.MemPool with an allocator of its own: its memory comes from there and goes back there, in
# whole segments; ours as a pool's allocator is no other. A pool that is lent in need is, and one without
# splitting hands out whole segments.
#: core
#: attach plain install run
#: memory 256
#: torch 2.11
import ctypes
import gc
import subprocess

import torch
from case import MIB, address_range, library, pattern, raises

SOURCE = """
#include <stddef.h>
#include <dlfcn.h>
size_t taken, given;
typedef int (*Malloc)(void **, size_t);
typedef int (*Free)(void *);
void *take(size_t size, int device, void *stream) {
    void *found = 0;
    Malloc function = (Malloc)dlsym(RTLD_DEFAULT, "cudaMalloc");
    if (!function || function(&found, size)) return 0;
    taken += size;
    return found;
}
void give(void *pointer, size_t size, int device, void *stream) {
    ((Free)dlsym(RTLD_DEFAULT, "cudaFree"))(pointer);
    given += size;
}
"""
with open("own.c", "w") as file:
    file.write(SOURCE)
subprocess.run(["cc", "-shared", "-fPIC", "-o", "own.so", "own.c", "-ldl"], check=True)
# The allocator asks the program's CUDA runtime.
own = ctypes.CDLL("./own.so")
for path in {line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line}:
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


def amount(name):
    return ctypes.c_size_t.in_dll(own, name).value


def empty(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


other = torch.cuda.memory.CUDAPluggableAllocator("./own.so", "take", "give")
pool = torch.cuda.MemPool(other.allocator())
host = pattern(3 * MIB)
with torch.cuda.use_mem_pool(pool):
    inside = host.cuda()
    assert amount("taken") == 20 * MIB, amount("taken")
    more = [empty(2) for _ in range(4)]
    assert amount("taken") == 20 * MIB
outside = host.cuda()
assert amount("taken") == 20 * MIB
assert torch.cuda.memory_allocated() == 14 * MIB
(segment,) = pool.snapshot()
# To CUDA the allocation is the allocator's, also where that has it from the library.
assert address_range(inside.data_ptr() + 100) == (segment["address"], 20 * MIB)
assert segment["total_size"] == 20 * MIB and not segment["is_expandable"]
assert torch.equal(inside.cpu(), host) and torch.equal(outside.cpu(), host)
del more
torch.cuda.empty_cache()
assert amount("given") == 0
# A tensor outlives its pool.
del pool
gc.collect()
assert torch.equal(inside.cpu(), host) and amount("given") == 0
del inside
torch.cuda.empty_cache()
assert amount("given") == 20 * MIB

# Whole segments.
whole = torch.cuda.MemPool(other.allocator(), no_split=True)
with torch.cuda.use_mem_pool(whole):
    first, second = empty(3), empty(3)
segments = whole.snapshot()
assert [len(it["blocks"]) for it in segments] == [1, 1], segments
del first, second, whole
torch.cuda.empty_cache()
assert amount("given") == amount("taken")

# The rest of the device is asked for: a pool that is lent has room.
lent = torch.cuda.MemPool(use_on_oom=True)
kept = torch.cuda.MemPool()
for one in lent, kept:
    with torch.cuda.use_mem_pool(one):
        room = empty(60)
    address = room.data_ptr()
    lent_at = address if one is lent else lent_at
    del room
torch.cuda.set_per_process_memory_fraction(min(1.0, 240 * MIB / torch.cuda.mem_get_info()[1]))
rest = []
try:
    while True:
        rest.append(empty(10))
except torch.OutOfMemoryError:
    pass
assert any(lent_at <= it.data_ptr() < lent_at + 60 * MIB for it in rest)
assert not any(address <= it.data_ptr() < address + 60 * MIB for it in rest)
del rest

# Ours is no other.
ours = torch.cuda.memory.CUDAPluggableAllocator(
    library()._name, "concertina_malloc", "concertina_free"
)
for allocator in ours.allocator(), torch.cuda.memory._get_current_allocator().allocator():
    same = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(same):
        tensor = host.cuda()
    assert torch.equal(tensor.cpu(), host)
    assert same.snapshot()[0]["is_expandable"]
    del tensor, same
del lent, kept, outside, one
gc.collect()
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
