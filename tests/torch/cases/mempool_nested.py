# Pools inside pools, and one pool used by several threads at once, while another thread uses none: each
# block lies in the pool whose scope is the innermost of its thread. PyTorch's own allocator refuses a pool
# that is in use already, in the same thread or another.
#: memory 512
#: torch 2.9
import threading

import torch
from case import MIB

outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()


def empty():
    return torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")


def live(pool):
    blocks = (block for segment in pool.snapshot() for block in segment["blocks"])
    return {block["address"] for block in blocks if block["state"] == "active_allocated"}


def addresses(tensors):
    return {tensor.data_ptr() for tensor in tensors}


with torch.cuda.use_mem_pool(outer):
    before = empty()
    with torch.cuda.use_mem_pool(inner):
        within = empty()
        with torch.cuda.use_mem_pool(inner):
            again = empty()
        still = empty()
    after = empty()
outside = empty()
assert live(outer) == addresses([before, after])
assert live(inner) == addresses([within, again, still])
del before, within, again, still, after

shared, wrong = torch.cuda.MemPool(), []
start = threading.Barrier(5)


def use(pool, kept):
    try:
        start.wait()
        for _ in range(200):
            if pool is None:
                kept.append(empty())
            else:
                with torch.cuda.use_mem_pool(pool):
                    kept.append(empty())
            if len(kept) > 4:
                kept.pop(0)
    except BaseException as error:
        wrong.append(error)


kept = [[] for _ in range(5)]
threads = [
    threading.Thread(target=use, args=(shared if at < 4 else None, mine))
    for at, mine in enumerate(kept)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
in_pool = addresses(tensor for mine in kept[:4] for tensor in mine)
assert len(in_pool) == 16
assert live(shared) == in_pool
assert not in_pool & addresses([*kept[4], outside])
del kept, threads, outside, outer, inner, shared
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == 0
