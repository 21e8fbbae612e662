# PyTorch's GPU trace that was activated before the library was there.
#: attach native
import torch
import torch.cuda._gpu_trace as gpu_trace

torch._C._activate_gpu_trace()
came, went = [], []
gpu_trace.register_callback_for_memory_allocation(came.append)
gpu_trace.register_callback_for_memory_deallocation(went.append)

import concertina  # noqa: E402

concertina.install()
block = torch.empty(1000, device="cuda")
assert came == [block.data_ptr()] and not went
del block
assert went == came
