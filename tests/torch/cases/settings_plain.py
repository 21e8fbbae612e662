# With expandable_segments:False each segment is one cudaMalloc of PyTorch's sizes, and the snapshot
# says so.
#: env PYTORCH_ALLOC_CONF=expandable_segments:False
import torch
from case import MIB

torch.cuda.memory._record_memory_history(stacks="python")
blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1, 2 * MIB, 30 * MIB)]
segments = torch.cuda.memory_snapshot()
assert sorted(it["total_size"] for it in segments) == [2 * MIB, 20 * MIB, 30 * MIB]
assert not any(it["is_expandable"] for it in segments)
assert torch.cuda.memory_stats()["segment.all.current"] == 3
del blocks
torch.cuda.empty_cache()
snapshot = torch.cuda.memory._snapshot()
actions = [it["action"] for it in snapshot["device_traces"][0]]
assert actions.count("segment_alloc") == actions.count("segment_free") == 3, actions
assert snapshot["segments"] == [] and torch.cuda.memory_reserved() == 0
