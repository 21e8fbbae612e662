# torch.backends.cudnn.benchmark = True: cuDNN tries its algorithms with as much memory as there is,
# and the results are those of any algorithm.
#: only gpu
import torch
from torch import nn

torch.backends.cudnn.benchmark = True
torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(0)
layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 5))
for size in (32, 64, 48):
    batch = torch.randn(4, 3, size, size)
    wanted = layers.cpu()(batch)
    found = layers.cuda()(batch.cuda())
    assert torch.allclose(found.cpu(), wanted, atol=1e-3)
    found.sum().backward()
assert torch.cuda.memory_stats()["num_ooms"] == 0
