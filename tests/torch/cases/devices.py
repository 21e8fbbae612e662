# Two devices: each has memory of its own.
#: devices 2
import torch
from case import MIB, counter, pattern

host = pattern(3 * MIB)
first = host.to("cuda:0")
second = first.cpu().to("cuda:1")
assert counter("allocated_bytes.all.current", 0) == 3 * MIB
assert counter("allocated_bytes.all.current", 1) == 3 * MIB
del first
assert torch.equal(second.cpu(), host)
assert counter("allocated_bytes.all.current", 0) == 0
