# Once CUDA is in use it is too late to change the allocator, and that is said.
#: core
#: attach native
import concertina
import torch
from case import raises

torch.empty(1, device="cuda")
assert "too late" in str(raises(RuntimeError, concertina.install))
