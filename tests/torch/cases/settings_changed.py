# Settings that a running program sets anew: rounding follows; what cannot is named once; pinned memory's
# stay PyTorch's.
#: says max_split_size_mb:40 has no effect here
#: says expandable_segments has no effect here while the program runs
import warnings

import torch
from case import MIB, raises

warnings.simplefilter("ignore")
change = torch.cuda.memory._set_allocator_settings


def taken(mebibytes):
    before = torch.cuda.memory_stats()
    kept = torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")
    after = torch.cuda.memory_stats()
    assert kept.numel() == after["requested_bytes.all.current"] - before["requested_bytes.all.current"]
    return (after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"]) // MIB


torch.cuda.init()
assert taken(21) == 21
change("roundup_power2_divisions:4")
assert taken(21) == 24
change("roundup_power2_divisions:[16:8,256:1,>:1]")
assert (taken(17), taken(33)) == (18, 33)
for _ in range(2):
    change("max_split_size_mb:40")
assert taken(21) == 21
change("expandable_segments:False")
assert torch.cuda.memory._snapshot()["segments"][0]["is_expandable"]
change("pinned_use_cuda_host_register:True,pinned_num_register_threads:2")
assert torch.empty(MIB, pin_memory=True).is_pinned()
change("")
raises((RuntimeError, ValueError), lambda: change("no_such_key:1"))
assert taken(21) == 21
