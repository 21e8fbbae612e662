# CONCERTINA_DISABLE leaves PyTorch as it is, however the program attaches.
#: env CONCERTINA_DISABLE=1

import concertina
import torch

assert not concertina.is_active()
assert torch.cuda.get_allocator_backend() == "native"
tensor = torch.ones(1 << 20, device="cuda")
assert torch.cuda.memory_reserved() == 20 << 20
assert not concertina.is_active()
