# torch.profiler with profile_memory=True sees what comes and goes on the GPU.
#: core
import json

import torch
from case import MIB
from torch.profiler import ProfilerActivity, profile

torch.empty(1, device="cuda")
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    passing = torch.empty(5 * MIB + 1, dtype=torch.uint8, device="cuda")
    del passing
profiler.export_chrome_trace("trace.json")
with open("trace.json") as file:
    events = json.load(file)["traceEvents"]
memory = [it["args"] for it in events if it.get("name") == "[memory]"]
memory = [it for it in memory if it["Device Type"] == 1]
assert [it["Bytes"] for it in memory] == [3 * MIB, 5 * MIB + 512, -(5 * MIB + 512)], memory
before = memory[0]["Total Allocated"] - 3 * MIB
assert [it["Total Allocated"] - before for it in memory] == [3 * MIB, 8 * MIB + 512, 3 * MIB]
assert memory[-1]["Total Reserved"] == torch.cuda.memory_reserved()

# The older one, too, and whoever starts it.
with torch.autograd.profiler_legacy.profile(profile_memory=True) as profiler:
    more = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
assert sum(it.device_memory_usage for it in profiler.function_events) == 3 * MIB
