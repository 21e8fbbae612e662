# What C++ asks the allocator object itself: the same figures, field by field.
#: core
#: attach native
import torch
from case import MIB

asked_by_cxx = torch._C._cuda_memoryStats
import concertina

concertina.install()
assert torch._C._cuda_memoryStats is not asked_by_cxx
torch.cuda.init()
for device in range(torch.cuda.device_count()):
    assert asked_by_cxx(device) == torch._C._cuda_memoryStats(device)
kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 3 * MIB, 5 * MIB + 1)]
del kept[1]
try:
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
stats = asked_by_cxx(0)
assert stats == torch._C._cuda_memoryStats(0)
assert stats["allocated_bytes"]["all"]["peak"] > stats["allocated_bytes"]["all"]["current"] > 5 * MIB
assert stats["num_ooms"] == 1 and stats["allocation"]["small_pool"]["current"] == 1
