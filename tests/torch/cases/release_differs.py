# A build of PyTorch that is taken for a known release, and reads its classes another way: the functions with
# objects go back to what they are in any pluggable allocator, and one line says so.
#: core
#: attach native
import os
import tempfile

import torch
from case import MIB, raises, stats

asked_by_cxx = torch._C._cuda_memoryStats


def with_two_in_turn(device):
    read = asked_by_cxx(device)
    read["active_bytes"], read["requested_bytes"] = read["requested_bytes"], read["active_bytes"]
    return read


torch._C._cuda_memoryStats = with_two_in_turn
import concertina  # noqa: E402

with tempfile.TemporaryFile("w+") as said:
    stderr = os.dup(2)
    os.dup2(said.fileno(), 2)
    concertina.install()
    os.dup2(stderr, 2)
    said.seek(0)
    lines = [line for line in said.read().splitlines() if "classes" in line]
assert len(lines) == 1 and "torch.multiprocessing" in lines[0], lines
raises(RuntimeError, lambda: asked_by_cxx(0))
tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
raises(RuntimeError, tensor.untyped_storage()._share_cuda_)
assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 3 * MIB
del tensor
assert stats()["memory_stats"]["allocation.all.freed"] == 1
