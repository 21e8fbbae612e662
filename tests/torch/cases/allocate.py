# Tensors come and go, and the counters follow to the byte.
#: core
import torch
from case import MIB, counter

tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1, 512, 513, 3 * MIB)]
rounded = 512 + 512 + 1024 + 3 * MIB
assert counter("allocated_bytes.all.current") == rounded
assert counter("requested_bytes.all.current") == 1 + 512 + 513 + 3 * MIB
assert counter("allocation.all.current") == 4
assert all(it.data_ptr() % 512 == 0 for it in tensors)
starts = sorted((it.data_ptr(), it.numel()) for it in tensors)
assert all(a + size <= b for (a, size), (b, _) in zip(starts, starts[1:]))
del tensors
assert counter("allocated_bytes.all.current") == 0
assert counter("allocation.all.freed") == 4
assert counter("allocated_bytes.all.peak") == rounded
