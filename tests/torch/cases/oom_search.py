# The usual search for the largest batch that fits: out of memory is caught, and nothing of it stays.
#: alone
#: memory 512
import gc

import torch
from case import MIB, counter


def step(batch):
    weights = torch.empty(1 * MIB, dtype=torch.uint8, device="cuda")
    return weights, [torch.empty(batch * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]


def fits(batch):
    try:
        step(batch)
        return True
    except torch.OutOfMemoryError as error:
        assert str(error).startswith("CUDA out of memory."), error
        return False
    finally:
        gc.collect()


torch.cuda.init()
total = torch.cuda.mem_get_info()[0] // MIB
low, high = 1, total
while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
assert total // 4 - 32 - total // 50 <= low <= total // 4, (low, total)

kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
before = torch.cuda.memory_allocated()
retries = counter("num_ooms")
for turn in range(1000):
    try:
        torch.empty((total + turn) * MIB, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("it cannot fit")
assert torch.cuda.memory_allocated() == before == 64 * MIB
assert torch.cuda.memory_stats()["num_ooms"] == retries + 1000
assert fits(low - 64 // 4)
del kept
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
