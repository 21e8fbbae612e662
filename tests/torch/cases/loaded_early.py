# The library was loaded before PyTorch was, so that nothing was there to be fitted yet.
#: attach native
import ctypes
import os

library = os.environ["CONCERTINA_LIBRARY"]
ctypes.CDLL(library)

import torch  # noqa: E402

allocator = torch.cuda.memory.CUDAPluggableAllocator(
    library, "concertina_malloc", "concertina_free"
)
torch.cuda.memory.change_current_allocator(allocator)
tensor = torch.empty(1000, dtype=torch.uint8, device="cuda")

from case import raises  # noqa: E402

assert torch.cuda.memory_allocated() == 1024
raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))
side = torch.cuda.Stream()
tensor.record_stream(side)
torch.cuda.memory.empty_cache()
