# Events: they say when work is done, also on a GPU that is behind, and time does not run backwards.
#: env STANDIN_PACE=held
import torch
from case import GPU, MIB, pattern

stream = torch.cuda.Stream()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
host = pattern(4 * MIB).pin_memory()
back = torch.empty_like(host, pin_memory=True)
with torch.cuda.stream(stream):
    start.record()
    there = torch.empty_like(host, device="cuda")
    there.copy_(host, non_blocking=True)
    back.copy_(there, non_blocking=True)
    end.record()
if not GPU:
    assert not end.query()
end.synchronize()
assert end.query() and stream.query()
assert torch.equal(back, host)
assert start.elapsed_time(end) >= 0
