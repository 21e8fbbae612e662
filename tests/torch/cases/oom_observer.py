# Whoever attached an observer is told of each out-of-memory error before it is raised.
#: core
#: memory 256
import torch
from case import MIB, raises

seen = []
torch._C._cuda_attach_out_of_memory_observer(lambda *what: seen.append(what))
total = torch.cuda.mem_get_info()[1]
kept = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
assert seen == []
raises(torch.OutOfMemoryError, lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"))
((device, asked, most, free),) = seen
assert (device, asked, most) == (0, 2 * total, total), seen
assert 0 < free < total, seen
torch.cuda.set_per_process_memory_fraction(0.5)
raises(torch.OutOfMemoryError, lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"))
assert abs(seen[-1][2] - total // 2) <= total // 100, seen
