# PyTorch's GPU trace: its callbacks are called for each block that comes and goes, as under PyTorch's own
# allocator, and the sanitizer that is made of them finds what it finds there.
#: attach plain install native
from case import ATTACH, both

PROGRAM = """
import gc
import threading
import torch
import torch.cuda._gpu_trace as gpu_trace

MIB = 1 << 20
torch.cuda.init()
early = torch.empty(MIB, dtype=torch.uint8, device="cuda")
seen, live = [], {}


def note(name):
    return lambda *arguments: seen.append((name, len(arguments)))


def came(address):
    assert address not in live.values()
    live[len(live)] = address
    seen.append(("came", len(live) - 1))


def went(address):
    # What it was called when it came, or -1 for what came before anybody watched.
    names = [name for name, at in live.items() if at == address]
    if names:
        live[names[0]] = None
    seen.append(("went", *(names or [-1])))


torch._C._activate_gpu_trace()
gpu_trace.register_callback_for_memory_allocation(came)
gpu_trace.register_callback_for_memory_deallocation(went)
gpu_trace.register_callback_for_event_creation(note("event"))
gpu_trace.register_callback_for_event_deletion(note("event gone"))
gpu_trace.register_callback_for_event_record(note("record"))
gpu_trace.register_callback_for_event_wait(note("wait"))
gpu_trace.register_callback_for_stream_creation(note("stream"))
gpu_trace.register_callback_for_device_synchronization(note("device"))
gpu_trace.register_callback_for_stream_synchronization(note("stream done"))
gpu_trace.register_callback_for_event_synchronization(note("event done"))

a = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
assert live[0] == a.data_ptr()
b = torch.empty(100, device="cuda")
assert live[1] == b.data_ptr()
del a
empty = torch.empty(0, device="cuda")
del empty
a = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
del early
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    c = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
c.record_stream(torch.cuda.current_stream())
event = torch.cuda.Event()
event.record(stream)
torch.cuda.current_stream().wait_event(event)
event.synchronize()
stream.synchronize()
torch.cuda.synchronize()
del c, event


def on_a_thread():
    held = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    del held


thread = threading.Thread(target=on_a_thread)
thread.start()
thread.join()
raw = torch.cuda.caching_allocator_alloc(5 * MIB)
assert raw == list(live.values())[-1]
torch.cuda.caching_allocator_delete(raw)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = torch.empty(MIB, dtype=torch.uint8, device="cuda")
del inside


def fail():
    held = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    try:
        raise KeyError("an error that is under way")
    finally:
        del held


try:
    fail()
except KeyError as error:
    seen.append(("error", str(error)))


def wrong(address):
    raise ValueError("a callback's own mistake")


# It is said, and goes no further.
gpu_trace.register_callback_for_memory_allocation(wrong)
d = torch.empty(7 * MIB, dtype=torch.uint8, device="cuda")
seen.append(("live", sum(at is not None for at in live.values())))
try:
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
del a, b, d, graph
gc.collect()
"""
mine, theirs = both(PROGRAM, "seen")
mine = [list(entry) for entry in mine]
assert mine == theirs, "\n".join(f"{a} {b}" for a, b in zip(mine, theirs) if a != b)
names = [name for name, *_ in mine]
assert names.count("came") >= 9 and names.count("went") >= 9, mine
