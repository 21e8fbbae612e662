# Memory history as C++ asks for it, in PyTorch's own functions: recorded there and told there, with the
# places that it noted; Python can tell it, too.
#: core
#: attach plain install native
#: torch 2.11
import ctypes
import pickle

import torch
from case import MIB, compiled

SOURCE = """
#include <cstring>
#include <torch/csrc/cuda/memory_snapshot.h>
extern "C" {
void record(bool on, bool places, bool stacks_of_cxx) {
    const std::vector<std::string> skip = {"free_completed"};
    torch::cuda::_record_memory_history(
        on, places, int64_t(10), places, stacks_of_cxx, true, false, false, skip);
}
size_t tell(char *to, size_t room) {
    std::string text = torch::cuda::_memory_snapshot_pickled();
    if (text.size() <= room) memcpy(to, text.data(), text.size());
    return text.size();
}
}
"""
caller = compiled(SOURCE)
caller.record.argtypes = [ctypes.c_bool] * 3
caller.record.restype = None
caller.tell.restype = ctypes.c_size_t
caller.tell.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def told():
    text = ctypes.create_string_buffer(1 << 24)
    size = caller.tell(text, len(text))
    return pickle.loads(text.raw[:size])


def made_here(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def names(thing):
    return [frame["name"] for frame in thing["frames"]]


before = made_here(4)
for places, stacks_of_cxx in (False, False), (True, False), (True, True):
    caller.record(True, places, stacks_of_cxx)
    assert torch._C._cuda_isHistoryEnabled()
    kept, gone = made_here(3), made_here(5)
    where = gone.data_ptr()
    del gone
    first = told()
    # That it was told is in the history from then on.
    assert first["device_traces"][0][-1]["action"] == "free_requested"
    second = torch.cuda.memory._snapshot()
    assert second["device_traces"][0][-1]["action"] == "snapshot"
    for snapshot in first, second:
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        live = {it["address"]: it for it in blocks if it["state"] == "active_allocated"}
        assert {it: live[it]["requested_size"] for it in live} == {
            kept.data_ptr(): 3 * MIB,
            before.data_ptr(): 4 * MIB,
        }
        for segment in snapshot["segments"]:
            assert sum(it["size"] for it in segment["blocks"]) == segment["total_size"]
            assert segment["address"] == segment["blocks"][0]["address"]
        assert not names(live[before.data_ptr()])
        assert ("made_here" in names(live[kept.data_ptr()])) == places
        assert any("::" in name for name in names(live[kept.data_ptr()])) == stacks_of_cxx
        trace = [it for it in snapshot["device_traces"][0] if it["size"] == 5 * MIB]
        actions = [it["action"] for it in trace if not it["action"].startswith("segment")]
        assert actions == ["alloc", "free_requested"], actions
        assert {it["addr"] for it in trace if it["action"] == "alloc"} == {where}
        assert all(it["time_us"] > 1_000_000_000_000_000 for it in trace)
        alloc = next(it for it in trace if it["action"] == "alloc")
        assert ("made_here" in names({"frames": alloc.get("frames", [])})) == places
    del kept
caller.record(False, False, False)
assert not torch._C._cuda_isHistoryEnabled()

# Then Python's again, of which C++ is told all but the places.
torch.cuda.memory._record_memory_history(stacks="python")
kept = made_here(7)
blocks = [block for segment in told()["segments"] for block in segment["blocks"]]
assert 7 * MIB in [block["requested_size"] for block in blocks]
segments = torch.cuda.memory._snapshot()["segments"]
blocks = {block["address"]: block for segment in segments for block in segment["blocks"]}
assert "made_here" in names(blocks[kept.data_ptr()])
torch.cuda.memory._record_memory_history(None)
