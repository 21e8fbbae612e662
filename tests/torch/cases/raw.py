# Memory without a tensor, as extensions take it: `caching_allocator_alloc` and `_delete`.
#: attach plain install native
import torch
from case import ATTACH, MIB, counter, pattern

host = pattern(3 * MIB)
first = torch.cuda.caching_allocator_alloc(3 * MIB)
assert first % 512 == 0
if ATTACH != "native":
    assert counter("allocated_bytes.all.current") == 3 * MIB
stream = torch.cuda.Stream()
second = torch.cuda.caching_allocator_alloc(MIB, device=0, stream=stream)
assert second + MIB <= first or first + 3 * MIB <= second
torch.cuda.caching_allocator_delete(first)
torch.cuda.caching_allocator_delete(second)
if ATTACH != "native":
    assert counter("allocated_bytes.all.current") == 0
    assert counter("allocation.all.freed") == 2
# The same bytes serve a tensor next.
there = host.cuda()
assert torch.equal(there.cpu(), host)
