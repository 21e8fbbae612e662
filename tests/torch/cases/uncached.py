# torch.cuda.caching_allocator_enable(False), and the variable for it: each block is the driver's own,
# as what looks for mistakes in accesses wants it, and none is counted; what is in use goes on.
import ctypes
import os
import subprocess
import sys

import torch
from case import GPU, MIB, library, pattern, raises, stats


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
# Who asks for the allocation at an address is told it.
base_alloc = library().concertina_base_alloc
base_alloc.restype, base_alloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
for block, host in zip(blocks, hosts):
    size = ctypes.c_size_t()
    assert base_alloc(block.data_ptr(), ctypes.byref(size)) == block.data_ptr()
    assert size.value == host.nbytes, size.value
# The driver knows how large each is, to the byte; the simulated one rounds up.
driver = ctypes.CDLL("libcuda.so.1")
for block, host in zip(blocks, hosts):
    size = ctypes.c_size_t()
    address = ctypes.c_uint64(block.data_ptr())
    assert driver.cuMemGetAddressRange_v2(None, ctypes.byref(size), address) == 0
    assert size.value == (host.nbytes if GPU else -(-host.nbytes // 512) * 512), size.value
blocks[0].record_stream(torch.cuda.Stream())
del block, blocks[1]
assert calls("cuMemFree") == given + 1
raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))
if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
    assert allocated == 0
    # The variable is for the whole process.
    torch.cuda.caching_allocator_enable(True)
    more = hosts[2].cuda()
    assert torch.cuda.memory_allocated() == 0 and calls("cuMemAlloc") == taken + 4
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
