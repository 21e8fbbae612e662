# torch.cuda.MemPool: memory of its own, counted users, and all of it given back in the end.
#: core
#: memory 512
#: torch 2.10
import torch
from case import MIB

pool = torch.cuda.MemPool()
other = torch.cuda.MemPool(use_on_oom=True, no_split=True)
assert pool.id != other.id
assert pool.use_count() == other.use_count() == 1


def empty():
    return torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")


with torch.cuda.use_mem_pool(pool):
    assert pool.use_count() == 2
    inside = [empty() for _ in range(3)]
assert pool.use_count() == 1
outside = empty()
mine = pool.snapshot()
assert sum(it["allocated_size"] for it in mine) == 12 * MIB
assert {tuple(it["segment_pool_id"]) for it in mine} == {tuple(pool.id)}
held = {b["address"] for s in mine for b in s["blocks"] if b["state"] == "active_allocated"}
assert held == {it.data_ptr() for it in inside}
assert torch.cuda.memory_allocated() == 16 * MIB
del inside, pool, other
assert torch.cuda.memory_allocated() == 4 * MIB
del outside
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
