# A thousand captured CUDA graphs, each with a private pool of its own, beside the same under PyTorch's own
# allocator: what each makes is right, and they take no more of the device's memory. Says what a graph takes,
# by the device's own figure, and how long its capture and its end do.
#: only gpu
#: attach plain install
from case import MIB, both

PROGRAM = '''
import time
import torch

GRAPHS = 1000


def taken():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def captured(x, number):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.relu(x * 2 + number).cumsum(0)
    return graph, made


def main():
    x = torch.arange(4096, dtype=torch.float32, device="cuda")
    # What the first graph takes besides is there once.
    first = captured(x, 0)
    before, began = taken(), time.perf_counter()
    graphs = [captured(x, number) for number in range(GRAPHS)]
    torch.cuda.synchronize()
    capture = (time.perf_counter() - began) / GRAPHS
    memory = taken() - before
    for graph, _ in graphs:
        graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for graph, _ in graphs:
        graph.replay()
    torch.cuda.synchronize()
    replay = (time.perf_counter() - began) / GRAPHS
    host = x.cpu().double()
    right = all(
        torch.allclose(made.cpu().double(), (host * 2 + number).cumsum(0), rtol=1e-5)
        for number, (_, made) in enumerate(graphs)
    )
    began = time.perf_counter()
    graphs.clear()
    left = taken() - before
    end = (time.perf_counter() - began) / GRAPHS
    return {"right": right, "memory": memory, "left": left, "capture": capture, "replay": replay, "end": end}
'''

mine, theirs = both(PROGRAM, "main()")
for name, it in (("concertina", mine), ("PyTorch", theirs)):
    print(
        f"{name}: {it['memory'] / MIB / 1000:.3f} MiB a graph, {it['left'] / MIB:.0f} MiB left; "
        f"{it['capture'] * 1e6:.0f} us to capture, {it['replay'] * 1e6:.1f} us to replay, "
        f"{it['end'] * 1e6:.0f} us to end one"
    )
assert mine["right"] and theirs["right"]
assert mine["memory"] <= theirs["memory"] * 1.05 + 64 * MIB, (mine, theirs)
assert mine["left"] <= theirs["left"] + 64 * MIB, (mine, theirs)
