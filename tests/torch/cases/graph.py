# A CUDA graph is captured and replayed: its memory is its own until the graph goes.
#: core
#: attach plain install native
import torch
from case import MIB, pattern

source = pattern(4 * MIB).cuda()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    middle = torch.empty_like(source)
    middle.copy_(source)
    result = middle.clone()
    del middle
for seed in (2, 3):
    host = pattern(4 * MIB, seed)
    source.copy_(host)
    # What the program allocates meanwhile is not the graph's.
    others = [torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.cpu(), host)
    assert not any(other.cpu().any() for other in others)
    del others
del result, graph
torch.cuda.empty_cache()
again = pattern(4 * MIB).cuda()
assert torch.equal(again.cpu(), pattern(4 * MIB))
