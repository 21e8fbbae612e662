# NCCL registering all memory: each plain segment is told by name, and the variable is refused where memory is
# mapped.
#: env TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1
#: memory 256
#: torch 2.9
import ctypes
import os
import subprocess
import sys

import torch
from case import ALLOCATOR_HEADERS, MIB, compiled

SOURCE = """
#include <c10/cuda/CUDACachingAllocator.h>
#include <cstring>
#include <exception>
using namespace c10::cuda::CUDACachingAllocator;
static uint64_t count, entries[64][3];
extern "C" {
bool attach(char *message) {
    try {
        attachAllocatorTraceTracker([](const TraceEntry &entry) {
            if (entry.action_ < TraceEntry::SEGMENT_ALLOC || count == 64) return;
            uint64_t found[3] = {(uint64_t)entry.action_, entry.addr_, entry.size_};
            memcpy(entries[count++], found, sizeof(found));
        });
        return true;
    } catch (const std::exception &error) {
        strncpy(message, error.what(), 1000);
        return false;
    }
}
size_t told(uint64_t *to) {
    memcpy(to, entries, sizeof(entries));
    return count;
}
}
"""
torch.cuda.init()
caller = compiled(SOURCE, ALLOCATOR_HEADERS)
caller.attach.restype = ctypes.c_bool
caller.told.restype = ctypes.c_size_t
message = ctypes.create_string_buffer(1000)
if "False" not in os.environ.get("CONCERTINA_CONF", ""):
    assert not caller.attach(message) and b"expandable_segments:False" in message.value, message.value
    # The same with plain segments.
    environment = os.environ | {"CONCERTINA_CONF": "expandable_segments:False"}
    subprocess.run([sys.executable, *sys.argv], env=environment, check=True)
    sys.exit()
assert caller.attach(message), message.value
tensor = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
(segment,) = torch.cuda.memory_snapshot()
del tensor
torch.cuda.empty_cache()
entries = (ctypes.c_uint64 * 3 * 64)()
found = [tuple(it) for it in entries[: caller.told(entries)]]
where = segment["address"], segment["total_size"]
assert (where[1] >= 40 * MIB) and [it for it in found if it[0] != 7] == [(3, *where), (4, *where)], found
