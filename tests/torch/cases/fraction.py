# A share of the device's memory is a limit, and 1.0 lifts it.
#: core
#: memory 256
#: only sim
import torch
from case import MIB, counter, stats

torch.empty(1, device="cuda")
torch.cuda.set_per_process_memory_fraction(0.5)
assert stats()["limit_bytes"] == 128 * MIB
blocks = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
assert counter("reserved_bytes.all.current") <= 128 * MIB
torch.cuda.set_per_process_memory_fraction(1.0)
assert stats()["limit_bytes"] is None
blocks += [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
assert counter("allocated_bytes.all.current") == 200 * MIB
