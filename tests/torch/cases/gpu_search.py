# The usual search for the largest batch that trains: out of memory in forward and in backward, caught
# and gone on from, as libraries do it.
#: alone
#: only gpu
import gc

import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.1)
limit = int(torch.cuda.mem_get_info()[1] * 0.1)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()


def fits(batch):
    try:
        model(torch.randn(batch, 1024, device="cuda")).sum().backward()
        return True
    except RuntimeError as error:
        assert "CUDA out of memory." in str(error), error
        return False
    finally:
        model.zero_grad(set_to_none=True)
        gc.collect()


batch, failures = 1024, 0
while fits(batch):
    batch *= 2
low, high = batch // 2, batch
while high - low > 1024:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
assert fits(low)
before = torch.cuda.memory_allocated()
for _ in range(100):
    assert not fits(high * 2)
assert torch.cuda.memory_allocated() == before
assert fits(low)
assert torch.cuda.max_memory_reserved() <= 1.01 * limit
# Eight layers keep what went into each.
assert low * 1024 * 4 * 8 <= limit
