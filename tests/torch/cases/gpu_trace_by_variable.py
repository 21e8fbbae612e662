# PyTorch's stream sanitizer, switched on as PyTorch's documentation says: at the end of the import of torch,
# before any allocator is set.
#: attach plain install native
#: env TORCH_CUDA_SANITIZER=1
import torch
import torch.cuda._sanitizer as sanitizer
from case import raises

side = torch.cuda.Stream()
for _ in range(3):
    # In order, in memory that is used again.
    with torch.cuda.stream(side):
        block = torch.empty(1000, device="cuda")
        block.fill_(1)
    del block
    torch.cuda.empty_cache()
    block = torch.empty(1000, device="cuda")
    block.fill_(1)
    del block
block = torch.empty(1000, device="cuda")
block.fill_(1)
with torch.cuda.stream(side):
    raises(sanitizer.CUDASanitizerErrors, lambda: block.mul_(5))
