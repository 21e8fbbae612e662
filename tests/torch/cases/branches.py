# A graph over two streams: the second takes part by an event, and is joined again.
#: attach plain install native
import torch
from case import MIB, pattern

source = pattern(2 * MIB).cuda()
side = torch.cuda.Stream()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    one = source.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = source.clone()
    torch.cuda.current_stream().wait_stream(side)
    result = torch.empty_like(other)
    result.copy_(other)
host = pattern(2 * MIB, 9)
source.copy_(host)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(one.cpu(), host) and torch.equal(result.cpu(), host)
