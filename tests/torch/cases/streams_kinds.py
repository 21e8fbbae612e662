# Streams of every kind, while memory is scarce and the GPU is behind: each thread's own default stream,
# streams that are destroyed while their work goes on (their handles come back), and tensors that one
# thread makes, others use on streams of theirs, and yet others let go of. No byte is another's.
#: memory 192
#: env STANDIN_PACE=random:11
import ctypes
import queue
import threading

import torch
from case import GPU, MIB, counter, pattern

SIZE = 3 * MIB
torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(min(1.0, 150 * MIB / torch.cuda.mem_get_info()[1]))
hosts = [pattern(SIZE, seed) for seed in range(5)]
locked = [host.pin_memory() for host in hosts]
results = []
wrong = []


def there_and_back(number):
    """Copies a pattern to memory that is let go of at once, by way of another, and back; on the present
    stream, without waiting."""
    there = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    there.copy_(locked[number], non_blocking=True)
    again = there.clone()
    del there
    back = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    back.copy_(again, non_blocking=True)
    results.append((number, back))


def check():
    torch.cuda.synchronize()
    for number, back in results:
        assert torch.equal(back.cpu(), hosts[number]), number
    results.clear()


def run(*works):
    def guarded(work):
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    check()


# The per-thread default stream: one handle, a stream for each thread.
PER_THREAD = 2


def on_own_default():
    with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
        for turn in range(12):
            there_and_back(turn % 5)


run(*[on_own_default] * 4)

# Streams that are destroyed. (PyTorch keeps pinned memory until the streams that used it have come so
# far, and asks those that are gone, too: there is none here.)
runtime = torch.cuda.cudart()
sources = [host.cuda() for host in hosts]
torch.cuda.synchronize()
handles = set()


def on_device(number):
    there = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    there.copy_(sources[number])
    results.append((number, there.clone()))


for turn in range(60):
    handle = ctypes.c_void_p()
    assert int(runtime.cudaStreamCreate(ctypes.addressof(handle))) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        on_device(turn % 5)
        kept = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        kept.copy_(sources[turn % 3])
    assert int(runtime.cudaStreamDestroy(handle.value)) == 0
    handles.add(handle.value)
    # Let go of after its stream is gone; what follows, on another one, wants memory, too.
    del kept
    on_device((turn + 2) % 5)
    if turn % 8 == 7:
        check()
check()
del sources
assert GPU or len(handles) < 60, "no handle came back"

# From thread to thread.
made, used = queue.Queue(4), queue.Queue(4)
LAST = None


def make():
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        stream = torch.cuda.current_stream()
        for turn in range(30):
            tensor = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
            tensor.copy_(locked[turn % 5], non_blocking=True)
            made.put((turn % 5, tensor, stream))
            del tensor
    made.put(LAST)


def use():
    mine = torch.cuda.Stream()
    while (item := made.get()) is not LAST:
        number, tensor, stream = item
        mine.wait_stream(stream)
        with torch.cuda.stream(mine):
            back = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
            back.copy_(tensor.clone(), non_blocking=True)
            tensor.record_stream(mine)
        results.append((number, back))
        used.put(tensor)
        del item, tensor
    used.put(LAST)


def let_go():
    while used.get() is not LAST:
        there_and_back(1)


run(make, use, let_go)
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert counter("allocated_bytes.all.current") == 0
