# The memory functions, from the first statement on.
#: core
import torch

torch.cuda.reset_peak_memory_stats()
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 0

from case import MIB, TORCH, raises  # noqa: E402

AREAS = ("all", "small_pool", "large_pool")
FLOWS = ("current", "peak", "allocated", "freed")
keys = {
    f"{name}.{area}.{flow}"
    for name in (
        "allocation",
        "segment",
        "active",
        "inactive_split",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    )
    for area in AREAS
    for flow in FLOWS
}
keys |= {f"oversize_{what}.{flow}" for what in ("allocations", "segments") for flow in FLOWS}
keys |= {f"num_{what}" for what in ("alloc_retries", "ooms", "sync_all_streams")}
keys |= {"num_device_alloc", "num_device_free", "max_split_size"}
assert len(keys) == 122
newer = {"num_oom_rejections"} if TORCH >= (2, 12) else set()
assert set(torch.cuda.memory_stats()) == keys | newer

big = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
small = torch.empty(1000, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 30 * MIB + 1024
stats = torch.cuda.memory_stats()
assert stats["requested_bytes.all.current"] == 30 * MIB + 1000
assert stats["allocation.small_pool.current"] == stats["allocation.large_pool.current"] == 1
assert torch.cuda.memory_reserved() >= 30 * MIB + 1024
del big
assert torch.cuda.memory_allocated() == 1024
assert torch.cuda.max_memory_allocated() == 30 * MIB + 1024
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == 1024
assert torch.cuda.memory_stats()["allocation.all.allocated"] == 2
torch.cuda.reset_accumulated_memory_stats()
stats = torch.cuda.memory_stats()
assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 0
assert stats["allocation.all.current"] == 1
assert stats["num_device_alloc"] == 0
torch.cuda.reset_max_memory_allocated()

assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == 1024
assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary(abbreviated=True)
free, total = torch.cuda.mem_get_info()
assert 0 < free < total
raises((RuntimeError, AssertionError, ValueError), lambda: torch.cuda.memory_stats(99))

# From 2.9 on.
if hasattr(torch.accelerator, "memory_allocated"):
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == 1024
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() > 0
    assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
    figures = dict(torch.cuda.memory_stats())
    assert dict(torch.accelerator.memory_stats()) == {key: figures[key] for key in figures.keys() - newer}
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    small = None
    assert torch.accelerator.memory_allocated() == 0
    waits = torch.cuda.memory_stats()["num_sync_all_streams"]
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_stats()["num_sync_all_streams"] == waits + 1
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["num_sync_all_streams"] == waits + 2
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() == 0

pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= MIB
torch.cuda.reset_peak_host_memory_stats()
torch.cuda.reset_accumulated_host_memory_stats()
assert isinstance(torch.cuda.list_gpu_processes(), str)
assert torch.cuda.get_allocator_backend() == "pluggable"
