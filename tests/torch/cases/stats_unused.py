# What is given back before there is anything: each time counts as a wait, on each device, used or not.
#: attach plain native
#: devices 2
import torch


def waits():
    stats = [torch.cuda.memory_stats(device) for device in (0, 1)]
    return [it["num_sync_all_streams"] for it in stats]


torch.cuda.init()
torch.cuda.empty_cache()
torch.cuda.empty_cache()
assert waits() == [2, 2]
torch.cuda.reset_accumulated_memory_stats(1)
assert waits() == [2, 0]
kept = torch.empty(1, device="cuda:0")
before = waits()
torch.cuda.empty_cache()
assert waits() == [it + 1 for it in before]
del kept
other = torch.empty(1, device="cuda:1")
torch.cuda.empty_cache()
assert waits() == [it + 2 for it in before]
torch.cuda.reset_accumulated_memory_stats(0)
assert waits() == [0, 2]
