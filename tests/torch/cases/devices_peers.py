# From one device straight to another where they reach each other's memory.
#: devices 2
#: env STANDIN_PEERS=1
import torch
from case import MIB, pattern

host = pattern(3 * MIB)
first = host.to("cuda:0")
second = first.to("cuda:1")
third = torch.empty_like(first)
third.copy_(second)
assert torch.equal(second.cpu(), host) and torch.equal(third.cpu(), host)
torch.cuda.synchronize(0)
torch.cuda.synchronize(1)
