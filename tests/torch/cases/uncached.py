# torch.cuda.caching_allocator_enable(False), and the variable for it: each block is the driver's own,
# as what looks for mistakes in accesses wants it, and none is counted; what is in use goes on.
import os
import subprocess
import sys

import torch
from case import MIB, pattern, raises, stats


def calls(name):
    """How many of them did what they were asked."""
    made = stats()["driver_calls"].get(name, {"count": 0, "failed": 0})
    return made["count"] - made["failed"]


if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
    torch.empty(1, device="cuda")
else:
    before = pattern(3 * MIB).cuda()
    torch.cuda.caching_allocator_enable(False)
allocated = torch.cuda.memory_allocated()
taken, given = calls("cuMemAlloc"), calls("cuMemFree")
hosts = [pattern(size, size) for size in (1, 1000, 5 * MIB)]
blocks = [host.cuda() for host in hosts]
assert calls("cuMemAlloc") == taken + 3
for block, host in zip(blocks, hosts):
    assert torch.equal(block.cpu(), host)
assert torch.cuda.memory_allocated() == allocated
del block, blocks[1]
assert calls("cuMemFree") == given + 1
raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))
if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
    assert allocated == 0
    sys.exit()

# Some of each kind, freed after the change.
del before
assert torch.cuda.memory_allocated() == 0
torch.cuda.caching_allocator_enable(True)
again = hosts[2].cuda()
assert torch.cuda.memory_allocated() == 5 * MIB and calls("cuMemAlloc") == taken + 3
assert torch.equal(blocks[1].cpu(), hosts[2])
del blocks, again
assert calls("cuMemFree") == given + 3 and torch.cuda.memory_allocated() == 0
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0

environment = {name: value for name, value in os.environ.items() if name != "CONCERTINA_STATS"}
environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
subprocess.run([sys.executable, *sys.argv], env=environment, check=True)
