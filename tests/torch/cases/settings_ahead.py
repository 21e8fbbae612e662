# Memory taken at the start is there at once; a device that has not so much is used all the same.
#: memory 512
#: env CONCERTINA_CONF=preallocate:200MiB
import torch
from case import MIB

torch.empty(1, device="cuda")
assert 200 * MIB <= torch.cuda.memory_reserved() <= 208 * MIB
calls = torch.cuda.memory_stats()["num_device_alloc"]
kept = torch.empty(150 * MIB, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_stats()["num_device_alloc"] == calls
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() <= 160 * MIB
