# Where other libraries' memory lies among PyTorch's: snapshots, the history and the message say what is
# PyTorch's, and what is not.
#: attach run
#: memory 256
import collections
import ctypes

import torch
from case import MIB, raises, stats
from torch.cuda import _memory_viz

runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
asked_by_cxx = torch._C._cuda_memoryStats


def take(size):
    address = ctypes.c_void_p()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    found = runtime.cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(size), stream)
    assert found == 0, found
    return address, stream


torch.cuda.memory._record_memory_history(max_entries=1000)
own = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 2, 3)]
others = [take(size * MIB) for size in (4, 5)]
kept = torch.empty(6 * MIB, dtype=torch.uint8, device="cuda")
# PyTorch gets what the library had, and the other way round.
del own[1]
assert runtime.cudaFreeAsync(*others.pop(0)) == 0
others.append(take(2 * MIB))
own.append(torch.empty(4 * MIB, dtype=torch.uint8, device="cuda"))
assert torch.cuda.memory_allocated() == 14 * MIB
assert torch.cuda.max_memory_allocated() == 14 * MIB
assert stats()["other_libraries"]["allocated_bytes.all.current"] >= 7 * MIB

snapshot = torch.cuda.memory._snapshot()
segments = snapshot["segments"]
counted = torch.cuda.memory_stats()
for key, name in {
    "total_size": "reserved_bytes",
    "allocated_size": "allocated_bytes",
    "active_size": "active_bytes",
    "requested_size": "requested_bytes",
}.items():
    assert sum(it[key] for it in segments) == counted[f"{name}.all.current"], key
blocks = [block for segment in segments for block in segment["blocks"]]
live = {block["address"]: block for block in blocks if block["state"] == "active_allocated"}
assert set(live) == {it.data_ptr() for it in (*own, kept)}
foreign = {block["address"]: block for block in blocks if block.get("other_library")}
assert {address.value for address, _ in others} <= set(foreign)
assert {block["state"] for block in foreign.values()} == {"inactive"}
inactive = sum(block["size"] for block in blocks if block["state"] == "inactive")
free = inactive - sum(block["size"] for block in foreign.values())
assert free == counted["inactive_split_bytes.all.current"]
assert not any(block["frames"] for block in foreign.values())
for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
    assert "<html" in plot(snapshot).lower() or "<!doctype" in plot(snapshot).lower()
assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)

trace = snapshot["device_traces"][0]
count = collections.Counter(entry["action"] for entry in trace)
assert (count["alloc"], count["free_requested"], count["free_completed"]) == (5, 1, 1), count

error = raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 40, device="cuda"))
assert "In use by the program: 14.00 MiB; by other libraries: " in str(error), error
assert torch.cuda.memory_stats()["num_ooms"] == 1
