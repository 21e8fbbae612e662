# A history that is written by several threads, kept short, and read meanwhile.
#: memory 512
import threading

import torch
from case import MIB

torch.cuda.memory._record_memory_history(stacks="python", max_entries=200)


def work(seed):
    kept = []
    for turn in range(300):
        kept.append(torch.empty((turn * seed) % 7 + 1, 1000, device="cuda"))
        if len(kept) > 5:
            kept.pop(turn % 3)


threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
for thread in threads:
    thread.start()
for _ in range(10):
    trace = (torch.cuda.memory._snapshot()["device_traces"] or [[]])[0]
    assert len(trace) <= 200
    for entry in trace:
        if entry["action"] == "alloc":
            assert any(frame["name"] == "work" for frame in entry["frames"]), entry
for thread in threads:
    thread.join()
live = {}
torch.cuda.memory._record_memory_history(
    stacks="python", max_entries=100_000, clear_history=True
)
work(3)
for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
    if entry["action"] == "alloc":
        assert entry["addr"] not in live, "handed out twice"
        live[entry["addr"]] = entry["size"]
    elif entry["action"] == "free_completed":
        assert live.pop(entry["addr"]) == entry["size"]
assert live == {}
