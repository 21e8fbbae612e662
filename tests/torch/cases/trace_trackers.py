# Trackers of memory events that C++ attaches, as ProcessGroupNCCL does to register memory: what they are told,
# and that they may throw and allocate.
#: core
#: attach plain install run native
#: memory 256
#: torch 2.9
import ctypes
import gc
import threading
import time

import torch
from case import ALLOCATOR_HEADERS, ATTACH, MIB, compiled, raises

SOURCE = """
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>
#include <atomic>
#include <dlfcn.h>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>
using namespace c10::cuda::CUDACachingAllocator;

struct Entry { uint64_t action, device, address, size, stream, pool[2], tracker; };
static std::mutex mutex;
static std::vector<Entry> entries;
static std::atomic<std::thread::id> inside;
static uint64_t begun;
static thread_local bool nested;

extern "C" {
int wrong_times, overlaps;
uint64_t throws_at, allocates_at;

static void track(const TraceEntry &entry, uint64_t tracker) {
    auto before = inside.exchange(std::this_thread::get_id());
    overlaps += before != std::thread::id() && before != std::this_thread::get_id();
    uint64_t time = entry.time_.approx_t_;
    uint64_t stream = (uint64_t)entry.stream_;
    wrong_times += time < begun || time > (uint64_t)c10::getApproximateTime();
    {
        std::lock_guard<std::mutex> lock(mutex);
        entries.push_back({(uint64_t)entry.action_, (uint64_t)entry.device_, entry.addr_, entry.size_, stream,
                           {entry.mempool_.first, entry.mempool_.second}, tracker});
    }
    bool is_alloc = entry.action_ == TraceEntry::ALLOC && tracker == 0;
    if (is_alloc && entry.size_ == allocates_at && !nested) {
        nested = true;
        get()->raw_delete(get()->raw_alloc(1 << 20));
        nested = false;
    }
    inside = before;
    if (is_alloc && entry.size_ == throws_at) throw std::runtime_error("not today");
}

void attach() {
    begun = c10::getApproximateTime();
    // One whose state is inside the function, and one whose state is not.
    attachAllocatorTraceTracker([](const TraceEntry &entry) { track(entry, 0); });
    uint64_t large[8] = {1};
    attachAllocatorTraceTracker([large](const TraceEntry &entry) { track(entry, large[0]); });
}

size_t told(Entry *to, size_t room) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t count = std::min(room, entries.size());
    std::copy(entries.begin(), entries.begin() + count, to);
    entries.clear();
    return count;
}

void *take(size_t size, int, void *) {
    void *found = nullptr;
    reinterpret_cast<int (*)(void **, size_t)>(dlsym(RTLD_DEFAULT, "cudaMalloc"))(&found, size);
    return found;
}

void give(void *address, size_t size, int device, void *) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        entries.push_back({99, (uint64_t)device, (uint64_t)address, size, 0, {0, 0}, 0});
    }
    reinterpret_cast<int (*)(void *)>(dlsym(RTLD_DEFAULT, "cudaFree"))(address);
}
}
"""

ACTIONS = {
    number: name
    for number, name in enumerate(
        "alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap "
        "snapshot oom".split()
    )
} | {99: "given"}


class Entry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("number", "device", "address", "size", "stream")]
    _fields_ += [("pool_id", ctypes.c_uint64 * 2), ("tracker", ctypes.c_uint64)]

    @property
    def action(self):
        return ACTIONS[self.number]

    @property
    def pool(self):
        return tuple(self.pool_id)

    def seen(self):
        return self.action, self.address, self.size, self.pool


torch.cuda.init()
caller = compiled(SOURCE, ALLOCATOR_HEADERS)
caller.told.restype = ctypes.c_size_t
wrong_times, overlaps = (ctypes.c_int.in_dll(caller, it) for it in ("wrong_times", "overlaps"))
throws_at, allocates_at = (ctypes.c_uint64.in_dll(caller, it) for it in ("throws_at", "allocates_at"))


def told():
    """The entries since the last call; both trackers were told the same."""
    room = (Entry * 20000)()
    count = caller.told(room, ctypes.c_size_t(len(room)))
    assert count < len(room)
    first, second = ([it for it in room[:count] if it.tracker == tracker] for tracker in (0, 1))
    assert all(it.device == 0 for it in first)
    given = [it for it in first if it.action == "given"]
    assert throws_at.value or allocates_at.value or len(second) == len(first) - len(given)
    return first


def blocks(entries):
    return [it.seen() for it in entries if not it.action.startswith("segment")]


def empty(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


caller.attach()

# A tensor.
tensor = empty(3)
address = tensor.data_ptr()
entries = told()
assert entries[-1].seen() == ("alloc", address, 3 * MIB, (0, 0)), [it.seen() for it in entries]
assert entries[0].action == ("segment_alloc" if ATTACH == "native" else "segment_map")
assert sum(it.size for it in entries[:-1]) >= 3 * MIB
assert {it.pool for it in entries} == {(0, 0)} and {it.stream for it in entries} == {0}
del tensor
actions = "free_requested", "free_completed"
assert [it.seen() for it in told()] == [(it, address, 3 * MIB, (0, 0)) for it in actions]

# On another stream, and used on a third.
first, second = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(first):
    tensor = empty(3)
(allocated,) = [it for it in told() if it.action == "alloc"]
assert allocated.stream == first.cuda_stream
tensor.record_stream(second)
with torch.cuda.stream(second):
    tensor.fill_(1)
del tensor
entries = told()
for _ in range(1000):
    if len(blocks(entries)) == 2:
        break
    time.sleep(0.001)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    entries += told()
actions = [it.action for it in entries if it.address == allocated.address and it.size == 3 * MIB]
assert actions == ["free_requested", "free_completed"], actions

# empty_cache.
del entries
big = empty(40)
del big
told()
torch.cuda.empty_cache()
entries = told()
gone = {"segment_free"} if ATTACH == "native" else {"segment_unmap"}
assert {it.action for it in entries} == gone and {it.pool for it in entries} == {(0, 0)}
assert sum(it.size for it in entries) >= 40 * MIB

# A MemPool with an allocator of its own.
for path in {line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line}:
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
own = torch.cuda.memory.CUDAPluggableAllocator("./caller.so", "take", "give")
pool = torch.cuda.MemPool(own.allocator())
name = tuple(pool.id)
with torch.cuda.use_mem_pool(pool):
    small = empty(3)
entries = told()
assert [it.action for it in entries] == ["segment_alloc", "alloc"], [it.seen() for it in entries]
assert {it.pool for it in entries} == {name}
assert entries[0].size == 20 * MIB and entries[0].address == small.data_ptr()
with torch.cuda.use_mem_pool(pool):
    large = empty(64)
entries += told()
assert [it.action for it in entries[2:]] == ["segment_alloc", "alloc"]
assert entries[2].seen() == ("segment_alloc", large.data_ptr(), 64 * MIB, name)
segments = {(it.address, it.size) for it in entries if it.action == "segment_alloc"}
assert segments == {(it["address"], it["total_size"]) for it in torch.cuda.memory_snapshot(name)}
assert [it.action for it in told()] == ["snapshot"]
del small, large
assert all(it.pool == name for it in told())
del pool
gc.collect()
torch.cuda.empty_cache()
entries = told()
for segment in segments:
    gone = [it for it in entries if (it.address, it.size) == segment]
    assert [it.action for it in gone] == ["segment_free", "given"], [it.seen() for it in entries]
    assert gone[0].pool == name

# Memory history is another matter.
torch.cuda.memory._record_memory_history(stacks="python")
tensor = empty(2)
torch.cuda.memory._record_memory_history(None)
del tensor
assert [it[0] for it in blocks(told())] == ["alloc", "free_requested", "free_completed"]


# Threads.
def work():
    for step in range(200):
        empty(1 + step % 3)


threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
live = {}
for action, address, size, _ in blocks(told()):
    assert live.get(address, "free_completed") != action
    expected = {"alloc": None, "free_requested": "alloc", "free_completed": "free_requested"}
    assert live.pop(address, None) == expected[action]
    if action != "free_completed":
        live[address] = action
assert not live and not overlaps.value

# One that allocates.
allocates_at.value = 5 * MIB
tensor = empty(5)
allocates_at.value = 0
found = [(it[0], it[2]) for it in blocks(told())]
inner = [(action, MIB) for action in ("alloc", "free_requested", "free_completed")]
assert found == [("alloc", 5 * MIB), *inner], found
del tensor

# One that throws.
told()
before = torch.cuda.memory_allocated()
throws_at.value = 5 * MIB
assert "not today" in str(raises(RuntimeError, lambda: empty(5)))
(thrown,) = [it for it in told() if it.action == "alloc"]
throws_at.value = 0
tensor = empty(1)
found = blocks(told())
assert found.pop() == ("alloc", tensor.data_ptr(), MIB, (0, 0))
if ATTACH != "native":
    # PyTorch's own allocator loses the block.
    assert torch.cuda.memory_allocated() == before + MIB
    actions = "free_requested", "free_completed"
    assert found == [(it, thrown.address, 5 * MIB, (0, 0)) for it in actions], found
del tensor

# Out of memory.
told()
raises(torch.OutOfMemoryError, lambda: empty(1000))
(short,) = [it for it in told() if it.action == "oom"]
assert short.size == 1000 * MIB and 0 < short.address <= 256 * MIB
assert not wrong_times.value and not overlaps.value
