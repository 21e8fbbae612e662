# What is freed is kept until `empty_cache`, and then given back.
import torch
from case import MIB, counter

total = torch.cuda.mem_get_info()[1]
kept = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
passing = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
del passing
assert counter("reserved_bytes.all.current") >= 68 * MIB
torch.cuda.empty_cache()
reserved = counter("reserved_bytes.all.current")
assert 4 * MIB <= reserved <= 8 * MIB, reserved
del kept
torch.cuda.empty_cache()
assert counter("reserved_bytes.all.current") == 0
assert counter("segment.all.current") == 0
