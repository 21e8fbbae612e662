# A device that cannot map memory.
#: only sim
#: env STANDIN_VIRTUAL_MEMORY=0
#: says cannot map memory
import torch
from case import MIB, pattern, stats, to_gpu

host = pattern(30 * MIB)
there = to_gpu(host)
assert torch.equal(there.cpu(), host)
assert stats()["driver_calls"]["cuMemAlloc"]["count"] > 0
