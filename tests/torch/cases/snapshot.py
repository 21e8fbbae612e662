# A snapshot tells what there is, to the byte, and the history how it came to be, with the lines of
# the program; PyTorch's own tools read both.
#: core
#: torch 2.8
#: memory 512
import collections
import pickle

import torch
from case import MIB, raises
from torch.cuda import _memory_viz

torch.cuda.memory._record_memory_history(max_entries=1000)
assert torch._C._cuda_isHistoryEnabled()


def made_here(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


blocks = [made_here(size) for size in (1, 2, 3, 4, 5)]
side = torch.cuda.Stream()
blocks[1].record_stream(side)
del blocks[1], blocks[2]
raises(torch.OutOfMemoryError, lambda: made_here(1_000_000))
stats = torch.cuda.memory_stats()
torch.cuda.memory._dump_snapshot("snapshot.pickle")
with open("snapshot.pickle", "rb") as file:
    snapshot = pickle.load(file)
assert {"segments", "device_traces", "allocator_settings", "external_annotations"} <= set(snapshot)

segments = snapshot["segments"]
for key, name in {
    "total_size": "reserved_bytes",
    "allocated_size": "allocated_bytes",
    "active_size": "active_bytes",
    "requested_size": "requested_bytes",
}.items():
    assert sum(it[key] for it in segments) == stats[f"{name}.all.current"], key
for segment in segments:
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]
live = [it for s in segments for it in s["blocks"] if it["state"] == "active_allocated"]
assert sorted(it["size"] for it in live) == [1 * MIB, 3 * MIB, 5 * MIB]
assert {it["address"] for it in live} == {it.data_ptr() for it in blocks}
for block in live:
    names = [frame["name"] for frame in block["frames"]]
    assert "made_here" in names, names
    assert all({"name", "filename", "line"} <= set(frame) for frame in block["frames"])

trace = snapshot["device_traces"][0]
count = collections.Counter(entry["action"] for entry in trace)
assert (count["alloc"], count["free_requested"], count["oom"]) == (5, 2, 1), count
assert count["segment_map"] + count["segment_alloc"] > 0
oom = next(entry for entry in trace if entry["action"] == "oom")
assert oom["size"] == 1_000_000 * MIB and oom["device_free"] > 0
for entry in trace:
    assert entry["time_us"] > 1_000_000_000_000_000
    if entry["action"] in ("alloc", "free_requested", "oom"):
        assert any(frame["filename"].endswith(".py") for frame in entry["frames"]), entry
assert [it["time_us"] for it in trace] == sorted(it["time_us"] for it in trace)

# Blocks that other streams used come free later, and the history says when.
torch.cuda.synchronize()
del blocks
more = [made_here(8) for _ in range(6)]
torch.cuda.empty_cache()
count = collections.Counter(
    entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]
)
assert count["free_completed"] == count["free_requested"] == 5, count

for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
    assert "<html" in plot(snapshot).lower() or "<!doctype" in plot(snapshot).lower()
assert "made_here" in _memory_viz.memory(snapshot, lambda lines, *_: lines)
assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)

# What is kept is what was asked for.
torch.cuda.memory._record_memory_history(
    "all", context="alloc", stacks="python", max_entries=4, clear_history=True
)
made_here(1)
trace = torch.cuda.memory._snapshot()["device_traces"][0]
assert len(trace) <= 4
alloc = next(entry for entry in trace if entry["action"] == "alloc")
assert all(frame["filename"].endswith(".py") for frame in alloc["frames"])
if torch.__version__ >= "2.11":
    torch.cuda.memory._record_memory_history(
        max_entries=10, clear_history=True, skip_actions=["alloc"]
    )
    made_here(1)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert "alloc" not in {entry["action"] for entry in trace} and len(trace) > 1
raises(RuntimeError, lambda: torch.cuda.memory._record_memory_history("everything"))

# Names that the program gives what it does, and where segments come and go.
if torch.__version__ >= "2.11":
    torch.cuda.memory._set_memory_metadata("first epoch")
torch.cuda.memory._record_memory_history(compile_context=True, clear_history=True)
with torch.profiler.record_function("a stretch"):
    much = made_here(32)
in_region = torch.compile(made_here, backend="eager")
in_region(48)
made_here(1)


def give_back():
    torch.cuda.empty_cache()


give_back()
snapshot = torch.cuda.memory._snapshot()
stages = [(it["name"], it["stage"]) for it in snapshot["external_annotations"]]
assert ("a stretch", "START") in stages and ("a stretch", "END") in stages, stages
assert {"device", "time_us"} <= set(snapshot["external_annotations"][0])
trace = snapshot["device_traces"][0]
allocated = [it for it in trace if it["action"] == "alloc" and it["size"] >= MIB]
regions = [(it["size"] // MIB, it["compile_context"]) for it in allocated]
assert regions == [(32, "N/A"), (48, "Torch-Compiled Region: 0/0"), (1, "N/A")], regions
if torch.__version__ >= "2.11":
    assert {entry["user_metadata"] for entry in trace} == {"first epoch"}
    assert torch.cuda.memory._get_memory_metadata() == "first epoch"
    torch.cuda.memory._set_memory_metadata("")


def names(entries):
    return [{frame["name"] for frame in entry["frames"]} for entry in entries]


taken = [it for it in trace if it["action"] in ("segment_map", "segment_alloc")]
given = [it for it in trace if it["action"] in ("segment_unmap", "segment_free")]
assert all(names(taken)) and any("made_here" in found for found in names(taken))
assert given and all("give_back" in found for found in names(given))
del much

# Recording ends, and with it what was recorded.
torch.cuda.memory._record_memory_history(None)
assert not torch._C._cuda_isHistoryEnabled()
made_here(1)
assert not torch.cuda.memory._snapshot()["device_traces"][0]
torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=10)
torch.cuda.memory._record_memory_history(False)
assert torch.cuda.memory_snapshot()
