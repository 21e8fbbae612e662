# Entries of a memory history name the private pool, and the statistics count each pool's reserved bytes.
#: core
#: attach plain install native
#: torch 2.13
import torch
from case import MIB, raises

torch.cuda.memory._record_memory_history(max_entries=1000)


def made_here(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def pools_of(*actions):
    """The pools that entries with these actions name."""
    [trace] = torch.cuda.memory._snapshot()["device_traces"]
    return {entry["pool_id"] for entry in trace if entry["action"] in actions}


def figures(pool):
    stats = torch.cuda.memory_stats()
    name = f"reserved_bytes_by_private_pools.{pool.id[0]}_{pool.id[1]}.all"
    return tuple(stats[f"{name}.{flow}"] for flow in ("current", "peak", "allocated", "freed"))


shared = made_here(4)
pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    blocks = [made_here(4) for _ in range(3)]
    del blocks[0]
assert pools_of("alloc") == pools_of("segment_alloc", "segment_map") == {(0, 0), pool.id}
assert pools_of("free_requested") == pools_of("free_completed") == {pool.id}
with torch.cuda.use_mem_pool(other):
    raises(torch.OutOfMemoryError, lambda: made_here(1_000_000))
assert pools_of("oom") == {other.id}
assert {type(entry) for entry in pools_of("alloc")} == {tuple}

held = sum(it["total_size"] for it in pool.snapshot())
assert held >= 12 * MIB
assert figures(pool) == (held, held, held, 0), figures(pool)
torch.cuda.reset_accumulated_memory_stats()
assert figures(pool) == (held, held, 0, 0)
by_pool = torch._C._cuda_memoryStats(0)["reserved_bytes_by_private_pools"]
assert by_pool[pool.id]["large_pool"] == by_pool[pool.id]["all"]

blocks.clear()
del pool
torch.cuda.empty_cache()
assert pools_of("segment_free", "segment_unmap") <= {(0, 0), (0, 1)}
assert (0, 1) in pools_of("segment_free", "segment_unmap")
