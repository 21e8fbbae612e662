# PyTorch's own allocator stays, and one of its pools takes its segments from concertina.
#: attach native
#: memory 256
#: says CUDA out of memory
import os

import torch
from case import MIB, counter, pattern, raises

path = os.environ["CONCERTINA_LIBRARY"]
allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "concertina_malloc", "concertina_free")
pool = torch.cuda.MemPool(allocator.allocator())
host = pattern(3 * MIB)
outside = host.cuda()
with torch.cuda.use_mem_pool(pool):
    inside = host.cuda()
    # PyTorch takes whole segments, and keeps them.
    taken = counter("allocated_bytes.all.current")
    assert taken >= 3 * MIB and taken % (2 * MIB) == 0, taken
    much = 2 * torch.cuda.mem_get_info()[1]
    raises(torch.OutOfMemoryError, lambda: torch.empty(much, dtype=torch.uint8, device="cuda"))
assert torch.equal(inside.cpu(), host) and torch.equal(outside.cpu(), host)
del inside, pool
torch.cuda.empty_cache()
assert counter("allocated_bytes.all.current") == 0
