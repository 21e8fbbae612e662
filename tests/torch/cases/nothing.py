# A tensor without elements takes no memory, and is as good as any.
import torch
from case import stats

empty = torch.empty(0, device="cuda")
assert empty.data_ptr() == 0 and empty.numel() == 0
assert torch.empty(3, 0, device="cuda").cpu().shape == (3, 0)
del empty
some = torch.empty(16, device="cuda")
assert stats()["memory_stats"]["allocation.all.allocated"] == 1
