# Other mistakes are named, and the default is used.
#: attach plain
#: env CONCERTINA_CONF=free:lazy
#: says CONCERTINA_CONF: free:lazy makes no sense: free takes strict or relaxed; the default is strict

import concertina
import torch

tensor = torch.ones(1 << 20, device="cuda")
assert concertina.is_active()
