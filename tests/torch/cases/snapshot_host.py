# History of pinned memory, which PyTorch records itself, beside the GPU's, together and each alone.
#: core
#: attach plain native
#: torch 2.14
import torch
from case import MIB, raises


def told(**what):
    torch.cuda.memory._record_memory_history(clear_history=True, **what)
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    address = pinned.data_ptr()
    segments = [it for it in snapshot["host_segments"] if it["address"] == address]
    wanted = [-1] if what.get("record_pinned_host_memory") else []
    assert [it["device"] for it in segments] == wanted
    of_host = [it["action"] for it in snapshot["host_traces"] if it["addr"] == address]
    address = there.data_ptr()
    of_gpu = [it["action"] for it in snapshot["device_traces"][0] if it.get("addr") == address]
    return "alloc" in of_host, "alloc" in of_gpu


assert told() == (False, True)
assert told(record_pinned_host_memory=True) == (True, True)
assert told(record_pinned_host_memory=True, record_cuda=False) == (True, False)
assert told() == (False, True)
wrong = raises(
    RuntimeError,
    lambda: torch.cuda.memory._record_memory_history(None, record_pinned_host_memory=True),
)
assert "requires memory history" in str(wrong), wrong
assert not torch._C._cuda_isHistoryEnabled()
