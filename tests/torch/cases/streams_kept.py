# The driver is not asked about streams that PyTorch keeps for good, as it is about streams that may be
# destroyed: those of other libraries.
#: attach install
#: only sim
import os
import subprocess
import sys
import tempfile

import torch

COUNT = 200
PROGRAM = """
import concertina; concertina.install()
import ctypes, sys, torch
count, own = int(sys.argv[1]), sys.argv[2] == "own"
torch.empty(1, device="cuda")
handle = ctypes.c_void_p()
assert int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))) == 0
with torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.ExternalStream(handle.value)):
    for _ in range(count):
        torch.empty(1000, device="cuda")
assert torch.cuda.memory_stats()["allocation.all.allocated"] == count + 1
"""


def asked(*arguments):
    with tempfile.TemporaryDirectory() as scratch:
        report = os.path.join(scratch, "report")
        environment = os.environ | {"STANDIN_REPORT": report}
        environment.pop("CONCERTINA_STATS", None)
        program = [sys.executable, "-c", PROGRAM, *arguments]
        subprocess.run(program, env=environment, check=True)
        lines = dict(line.split() for line in open(report))
    return int(lines.get("cuStreamGetId", 0))


torch.empty(1, device="cuda")
assert asked(str(COUNT), "other") >= COUNT
# A preloaded library asks about each stream once, when it is created.
assert asked(str(COUNT), "own") - asked("0", "own") < 10
