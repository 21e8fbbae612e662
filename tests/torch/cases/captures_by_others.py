# Another library captures a graph by CUDA's own calls, on a stream of its own, while PyTorch allocates on this
# thread and on others.
#: core
#: attach native plain install run
import ctypes
import threading

import torch
from case import MIB

runtime = ctypes.CDLL(None)
if not hasattr(runtime, "cudaStreamBeginCapture"):
    runtime = ctypes.CDLL(next(l.split()[-1] for l in open("/proc/self/maps") if "libcudart" in l))

RELAXED, THREAD_LOCAL = 2, 1
streams = [torch.cuda.Stream() for _ in range(2)]
buffer = torch.empty(MIB, dtype=torch.uint8, device="cuda")


def churn(rounds):
    for i in range(rounds):
        with torch.cuda.stream(streams[i % 2]):
            a = torch.empty((i % 7 + 1) * MIB, dtype=torch.uint8, device="cuda")
            b = torch.empty((i % 5 + 1) * MIB, dtype=torch.uint8, device="cuda")
            a.record_stream(streams[(i + 1) % 2])
            a.zero_()
            del a
        del b


# What the default stream has left is wanted by others while streams are captured that synchronize with it.
left = [torch.empty((i + 1) * MIB, dtype=torch.uint8, device="cuda") for i in range(8)]
churn(60)
del left
torch.cuda.synchronize()
over = False


def beside():
    while not over:
        churn(20)


thread = threading.Thread(target=beside)
thread.start()
broken = 0
for flags in (1, 0):
    stream = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), flags) == 0
    for mode in (RELAXED, THREAD_LOCAL):
        for _ in range(20):
            graph = ctypes.c_void_p()
            began = runtime.cudaStreamBeginCapture(stream, mode)
            runtime.cudaMemsetAsync(ctypes.c_void_p(buffer.data_ptr()), 1, 1024, stream)
            if mode == RELAXED:
                churn(20)
            ended = runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))
            if began or ended:
                broken += 1
                runtime.cudaGetLastError()
over = True
thread.join()
assert broken == 0, f"{broken} captures broken"
