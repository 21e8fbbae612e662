# More than the device has cannot be taken at the start, and the program goes on without.
#: memory 512
#: env CONCERTINA_CONF=preallocate:100TiB
#: says preallocate has no effect on device 0: 102400.00 GiB cannot be had there
import torch

kept = torch.empty(1000, device="cuda")
assert torch.cuda.memory_allocated() == 4096
