# Each of PyTorch's settings is accepted in PyTorch's own syntax; what has no effect here is named.
#: env PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8,roundup_power2_divisions:[1:1,2:2,>:4],max_split_size_mb:200,expandable_segments:True,per_process_memory_fraction:0.5
#: says garbage_collection_threshold:0.8 has no effect here
#: says max_split_size_mb:200 has no effect here
import torch
from case import MIB

big = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 10 * MIB
assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 9 * MIB
assert torch.cuda.get_per_process_memory_fraction() == 0.5
