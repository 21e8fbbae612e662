# A memory fraction that is set before the first allocation holds, and can be read.
#: memory 512
import torch

assert torch.cuda.get_per_process_memory_fraction() == 1.0
torch.cuda.set_per_process_memory_fraction(0.25)
assert torch.cuda.get_per_process_memory_fraction() == 0.25

from case import raises  # noqa: E402

total = torch.cuda.mem_get_info()[1]


def empty(share):
    return torch.empty(int(total * share), dtype=torch.uint8, device="cuda")


kept = empty(0.2)
raises(torch.OutOfMemoryError, lambda: empty(0.1))
assert torch.cuda.memory_reserved() <= total // 4
torch.cuda.set_per_process_memory_fraction(1.0)
empty(0.1)
raises(ValueError, lambda: torch.cuda.set_per_process_memory_fraction(1.5))
assert torch.cuda.get_per_process_memory_fraction() == 1.0
