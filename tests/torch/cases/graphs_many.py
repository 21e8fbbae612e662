# Many CUDA graphs, each with a private pool of its own, as a program has that captures one for each of its
# shapes: they take addresses in proportion, of which the host wants some, too, and memory by the chunk.
#: attach plain install native
#: memory 144384
#: only sim
import mmap

import torch
from case import ATTACH, MIB, counter

GRAPHS = 400


def addresses():
    """Bytes of addresses that the process has."""
    with open("/proc/self/status") as status:
        return next(int(it.split()[1]) << 10 for it in status if it.startswith("VmSize"))


x = torch.zeros(1024, device="cuda")
before, graphs = addresses(), []
for _ in range(GRAPHS):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = (x + 1) * 2
    graphs.append((graph, made))
assert addresses() - before < GRAPHS * 128 * MIB, (addresses() - before) >> 30
# Private, anonymous, and as nobody touches it, without a claim on the host's memory (MAP_NORESERVE).
mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000).close()
if ATTACH != "native":
    assert counter("reserved_bytes.all.current") <= (GRAPHS + 1) * 2 * MIB
for graph, _ in graphs[:: GRAPHS // 4]:
    graph.replay()
torch.cuda.synchronize()
del graph, made, graphs, _
torch.cuda.empty_cache()
if ATTACH != "native":
    assert counter("reserved_bytes.all.current") == 2 * MIB
