# A release of PyTorch that nobody has seen: the functions of its allocator object that take or return objects
# stay as they are, one line says so, and everything plain works.
#: attach native
#: torch 2.11
import ctypes
import mmap
import os
import tempfile

import torch
from case import MIB, pattern, raises, to_gpu

home = os.path.join(os.path.dirname(torch.__file__), "lib")
asked_by_cxx = torch._C._cuda_memoryStats
shared_by_cxx = torch.UntypedStorage._share_cuda_


def library(name):
    return ctypes.CDLL(os.path.join(home, name))


def address_of(name, symbol):
    return ctypes.addressof(ctypes.c_char.in_dll(library(name), symbol))


# It says that it is 2.99: mov rax, ...; ret.
function = address_of("libtorch_cpu.so", "aoti_torch_abi_version")
page = function & -mmap.PAGESIZE
protect = ctypes.CDLL(None).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert protect(page, 2 * mmap.PAGESIZE, 7) == 0
code = b"\x48\xb8" + (2 << 56 | 99 << 48).to_bytes(8, "little") + b"\xc3"
ctypes.memmove(function, code, len(code))
assert protect(page, 2 * mmap.PAGESIZE, 5) == 0

import concertina  # noqa: E402

with tempfile.TemporaryFile("w+") as said:
    stderr = os.dup(2)
    os.dup2(said.fileno(), 2)
    concertina.install()
    os.dup2(stderr, 2)
    said.seek(0)
    lines = said.read().splitlines()
assert len(lines) == 1 and "this release of PyTorch is not known" in lines[0], lines
for loss in "torch.multiprocessing", "statistics for C++", "memory snapshots for C++":
    assert loss in lines[0], lines


# ---- what is in its table ------------------------------------------------------------------------
def words(address, count):
    return list((ctypes.c_size_t * count).from_address(address))


CLASS = "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
member = "_Z" + CLASS


def address(name):
    try:
        return address_of("libtorch_cuda.so", member + name)
    except ValueError:
        return None


plain = address_of("libtorch_cuda.so", f"_ZTV{CLASS}E") + 16
current = address_of("libc10_cuda.so", "_ZN3c104cuda20CUDACachingAllocator9allocatorE")
(object,) = words(current, 1)
(table,) = words(object, 1)
theirs = words(plain, 200)
count = theirs.index(address("4nameB5cxx11Ev")) + 1
theirs, fitted = theirs[:count], words(table, count)
assert fitted != theirs
changed = {at for at in range(count) if fitted[at] != theirs[at]}
may_change = {
    theirs.index(address(name))
    for name in (
        "10emptyCacheESt4pairIyyE",
        "9cacheInfoEaPm",
        "17getMemoryFractionEa",
        "17setMemoryFractionEda",
        "21resetAccumulatedStatsEa",
        "14resetPeakStatsEa",
        "19beginAllocateToPoolEaSt4pairIyyESt8functionIFbP11CUstream_stEE",
        "17endAllocateToPoolEaSt4pairIyyE",
        "11releasePoolEaSt4pairIyyE",
        "11memcpyAsyncEPviPKvimP11CUstream_stb",
    )
}
assert may_change <= changed
# enable, isEnabled, getPoolUseCount: of numbers alone.
cache_info = theirs.index(address("9cacheInfoEaPm"))
may_change |= {cache_info - 1, cache_info - 2}
may_change.add(theirs.index(address("11releasePoolEaSt4pairIyyE")) + 1)
assert changed == may_change, changed ^ may_change

# ---- what works ----------------------------------------------------------------------------------
raises(RuntimeError, lambda: asked_by_cxx(0))
tensor = to_gpu(pattern(3 * MIB))
side = torch.cuda.Stream()
tensor.record_stream(side)
assert torch.equal(tensor.cpu(), pattern(3 * MIB))
assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 3 * MIB
raises(RuntimeError, lambda: shared_by_cxx(tensor.untyped_storage()))
raises(RuntimeError, torch.cuda.MemPool)
torch.cuda.memory._record_memory_history()
del tensor
actions = [entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]]
assert "free_requested" in actions, actions
torch.cuda.memory._record_memory_history(None)
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kept = torch.zeros(MIB, device="cuda")
graph.replay()
