# One program under PyTorch's own allocator and under concertina: allocated, requested and active
# agree, current, peak, allocated and freed, by class and in all. The program's large sizes are such
# that PyTorch has nothing to leave unsplit: it counts up to a MiB that it did not split as allocated.
#: core
#: attach plain install native
#: memory 2048
from case import both

PROGRAM = """
import random
import torch

FIGURES = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes")
choice = random.Random(7)
side = torch.cuda.Stream()
seen, kept = [], []
for turn in range(401):
    size = choice.randrange(1, 1 << 20)
    if turn % 3 == 0:
        size = choice.randrange(1, 20) * (2 << 20) - choice.randrange(512)
    with torch.cuda.stream(side if turn % 5 == 0 else torch.cuda.current_stream()):
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    if turn % 7 == 0:
        kept[-1].record_stream(torch.cuda.current_stream() if turn % 5 == 0 else side)
    while len(kept) > 20:
        kept.pop(choice.randrange(len(kept)))
    if turn % 20 == 0:
        # Now nothing that was freed is still active.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if turn == 200:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
        stats = torch.cuda.memory_stats()
        seen.append({key: stats[key] for key in stats if key.split(".")[0] in FIGURES})
"""
mine, theirs = both(PROGRAM, "seen")
assert len(mine) == len(theirs) == 21
for turn, (a, b) in enumerate(zip(mine, theirs)):
    assert len(a) == len(b) == 5 * 3 * 4
    # How long a freed block is still active depends on when an allocator looks.
    soon = {key for key in b if key.endswith("peak") and not key.startswith("alloc")}
    wrong = {key: (a[key], b[key]) for key in b.keys() - soon if a[key] != b[key]}
    assert not wrong, f"at {20 * turn}: (here, there): {wrong}"
