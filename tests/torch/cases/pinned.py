# Page-locked memory, and copies from and to it that do not wait.
import torch
from case import MIB, pattern

host = pattern(8 * MIB).pin_memory()
assert host.is_pinned()
there = host.to("cuda", non_blocking=True)
back = torch.empty_like(host, device="cpu", pin_memory=True)
back.copy_(there, non_blocking=True)
torch.cuda.synchronize()
assert torch.equal(back, host)
