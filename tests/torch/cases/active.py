# One can see that it is on.
#: core
#: env CONCERTINA_CONF=verbose:1,limit:0.5G
#: says is on, as PyTorch's allocator
#: says limit: 0.500 GiB on each device; settings: verbose:1,limit:0.5G

import concertina
import torch

assert concertina.is_active()
assert torch.cuda.get_allocator_backend() == "pluggable"
tensor = torch.ones(1 << 20, device="cuda")
assert concertina.is_active()
assert concertina.stats()["version"] == concertina.__version__
assert concertina.stats()["used_gpu"]
