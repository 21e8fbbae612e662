# Without expandable segments each segment is one `cudaMalloc`, also where memory cannot be mapped.
#: env CONCERTINA_CONF=expandable_segments:False
import torch
from case import MIB, pattern, stats, to_gpu

host = pattern(30 * MIB)
there = to_gpu(host)
assert torch.equal(there.cpu(), host)
calls = stats()["driver_calls"]
assert calls["cuMemAlloc"]["count"] > 0 and calls["cuMemCreate"]["count"] == 0
