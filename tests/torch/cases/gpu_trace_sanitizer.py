# PyTorch's stream sanitizer finds the races that it finds under its own allocator, and no others: memory that
# was freed and is handed out again is new to it.
#: attach plain install native
from case import both

PROGRAM = """
import io, logging
import torch

# What it says of memory that nobody told it of.
said = io.StringIO()
logging.getLogger("torch.cuda._sanitizer").addHandler(logging.StreamHandler(said))
logging.getLogger("torch.cuda._sanitizer").setLevel(logging.INFO)
import torch.cuda._sanitizer as sanitizer

torch.cuda.init()
sanitizer.enable_cuda_sanitizer()
found = []
side = torch.cuda.Stream()


def look(act):
    try:
        act()
        found.append(0)
    except sanitizer.CUDASanitizerErrors as errors:
        found.append(len(errors.errors))


def race():
    a = torch.empty(1000, device="cuda")
    a.fill_(1)
    with torch.cuda.stream(side):
        a.mul_(5)


def in_order():
    a = torch.empty(1000, device="cuda")
    a.fill_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a.mul_(5)
    torch.cuda.current_stream().wait_stream(side)


def again():
    # The second has the memory of the first, whose stream nobody waited for: it is idle.
    with torch.cuda.stream(side):
        a = torch.empty(1000, device="cuda")
        a.fill_(1)
    del a
    torch.cuda.empty_cache()
    b = torch.empty(1000, device="cuda")
    b.fill_(1)


for act in race, in_order, again, race:
    look(act)
backfilled = "Backfilling" in said.getvalue()
sanitizer.cuda_sanitizer.enabled = False
"""
mine, theirs = both(PROGRAM, "[found, backfilled]")
assert mine == theirs == [[1, 0, 0, 1], False], (mine, theirs)
