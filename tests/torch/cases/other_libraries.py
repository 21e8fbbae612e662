# What other libraries of the process have from CUDA is not in PyTorch's figures, wherever it comes from: under
# `concertina run` it is from the same pool. One program under PyTorch's own allocator and under concertina.
#: attach plain install run native
#: memory 512
from case import ATTACH, MIB, both, stats

PROGRAM = """
import ctypes
import random
import torch

FIGURES = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes")
MIB = 1 << 20
runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def take(size, stream=None):
    address = ctypes.c_void_p()
    size = ctypes.c_size_t(size)
    if stream is None:
        assert runtime.cudaMalloc(ctypes.byref(address), size) == 0
    else:
        stream = ctypes.c_void_p(stream.cuda_stream)
        assert runtime.cudaMallocAsync(ctypes.byref(address), size, stream) == 0
    return address, stream


def give_back(address, stream):
    if stream is None:
        assert runtime.cudaFree(address) == 0
    else:
        assert runtime.cudaFreeAsync(address, stream) == 0


def figures():
    stats = torch.cuda.memory_stats()
    kept = {key: stats[key] for key in stats if key.split(".")[0] in FIGURES}
    return kept | {key: stats[key] for key in ("num_alloc_retries", "num_ooms")}


torch.cuda.init()
choice = random.Random(11)
side = torch.cuda.Stream()
# Before PyTorch has anything.
workspace = take(32 * MIB)
seen, own, others = [figures()], [], []
for turn in range(301):
    size = choice.choice((100, 4096, 70_000, 2 * MIB, 6 * MIB))
    stream = side if turn % 3 == 0 else torch.cuda.current_stream()
    # The same sizes, of which one gets what the other freed just now.
    for _ in range(3):
        give_back(*take(size, stream))
        with torch.cuda.stream(stream):
            torch.empty(size, dtype=torch.uint8, device="cuda")
        give_back(*take(size))
    with torch.cuda.stream(stream):
        own.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    others.append(take(size, stream if turn % 2 else None))
    if len(own) > 12:
        own.pop(choice.randrange(len(own)))
    if len(others) > 9:
        give_back(*others.pop(choice.randrange(len(others))))
    if turn % 20 == 0:
        if turn == 160:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
        seen.append(figures())
# Nobody's failure but its own.
address = ctypes.c_void_p()
assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(1 << 40)) == 2
seen.append(figures())
runtime.cudaGetLastError()
"""
mine, theirs = both(PROGRAM, "seen")
assert len(mine) == len(theirs) == 18
for at, (a, b) in enumerate(zip(mine, theirs)):
    assert len(a) == len(b) == 5 * 3 * 4 + 2
    wrong = {key: (a[key], b[key]) for key in b if a[key] != b[key]}
    assert not wrong, f"at {at}: (here, there): {wrong}"

if ATTACH != "native":
    import torch
    from program import others, workspace

    device = stats()
    own, rest = device["memory_stats"], device["other_libraries"]
    # Newer releases have keys of their own besides.
    assert own.items() <= dict(torch.cuda.memory_stats()).items()
    held = own["reserved_bytes.all.current"]
    assert held == torch.cuda.memory_reserved()
    active = own["active_bytes.all.current"] + rest["active_bytes.all.current"]
    assert held == active + own["inactive_split_bytes.all.current"]
    for key in "allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes":
        flow = {part: rest[f"{key}.all.{part}"] for part in ("current", "peak", "allocated", "freed")}
        assert flow["peak"] >= flow["current"], key
    if ATTACH == "run":
        # All that the program took by itself, and no more than it and what PyTorch loads.
        assert rest["allocation.all.current"] >= len(others) + 1
        assert 32 * MIB < rest["allocated_bytes.all.current"] < 128 * MIB
        assert rest["num_ooms"] == 1
    else:
        assert rest["allocation.all.peak"] == 0
