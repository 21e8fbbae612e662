# The state of a private pool is kept, and gone back to: the same blocks are in use at the same places,
# what lies there untouched, and storages own them again.
#: core
#: torch 2.8
#: attach plain install native
#: memory 256
import gc

import torch
from case import ATTACH, MIB, pattern, raises

core = torch._C
torch.cuda.init()
pool = torch.cuda.graph_pool_handle()
side = torch.cuda.Stream()


def inside(*hosts):
    """Copies of these in the pool, on a stream of their own."""
    with torch.cuda.stream(side):
        core._cuda_beginAllocateCurrentThreadToPool(0, pool)
        copies = [host.to("cuda", non_blocking=False) for host in hosts]
        core._cuda_endAllocateToPool(0, pool)
    side.synchronize()
    return copies


def blocks():
    segments = torch.cuda.memory_snapshot(pool)
    return {
        block["address"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def look(address, count):
    """A tensor over memory that another one owns."""
    storage = core._construct_storage_from_data_pointer(address, torch.device("cuda:0"), count)
    tensor = torch.empty(0, dtype=torch.uint8, device="cuda")
    return tensor.set_(storage, 0, (count,), (1,))


small, large = (pattern(count, count) for count in (1000, 3 * MIB + 7))
outside = large.cuda()
hosts = [small, large, small.flip(0).contiguous(), large.flip(0).contiguous()]
made = inside(*hosts)
del made[2]
state = core._cuda_getCheckpointState(0, pool)
kept = [hosts[0], hosts[1], hosts[3]]
places = [tensor.data_ptr() for tensor in made]
before = blocks()
assert before == set(places)
assert core._cuda_checkPoolLiveAllocations(0, pool, set(places))
assert not core._cuda_checkPoolLiveAllocations(0, pool, set(places[1:]))
assert not core._cuda_checkPoolLiveAllocations(0, pool, {*places, 0})
live = torch.cuda.memory_allocated()

# Everything dies; the memory, which nobody has taken since, is in use again. One storage owns its own
# block, one only looks at it, and of the third nothing is left but the block.
del made
assert not blocks() and core._cuda_checkPoolLiveAllocations(0, pool, set())
looks = [look(address, host.numel()) for address, host in zip(places[:2], kept)]
owner = looks[0].untyped_storage()._cdata
assert not core._has_Standard_Deleter(owner)
core._cuda_setCheckpointPoolState(0, state, [], [owner])
assert blocks() == before
if ATTACH != "native":  # which may not cut a block where it did before
    assert torch.cuda.memory_allocated() == live
assert core._has_Standard_Deleter(owner)
assert not core._has_Standard_Deleter(looks[1].untyped_storage()._cdata)
for tensor, host in zip(looks, kept):
    assert torch.equal(tensor.cpu(), host)
# What the pool hands out now lies beside them.
more = inside(*hosts)
for tensor, host in zip([*looks, *more], [*kept[:2], *hosts]):
    assert torch.equal(tensor.cpu(), host)

# Where that cannot be, what is in use stays so.
if ATTACH != "native":  # whose state cannot be tampered with
    stale = [tensor.untyped_storage()._cdata for tensor in more]
    wrong = type(state)(pool, [*state.blocks, [1 << 20, 512, 512, 0, 0]])
    raises(RuntimeError, lambda: core._cuda_setCheckpointPoolState(0, wrong, stale, []))
    assert blocks() == before
    for tensor, host in zip(looks, kept):
        assert torch.equal(tensor.cpu(), host)
    more = inside(*hosts)
    core._cuda_releasePool(0, pool)

# Back again while there are other blocks: those have to be named, and go.
stale = [tensor.untyped_storage()._cdata for tensor in more]
core._cuda_setCheckpointPoolState(0, state, stale, [])
assert blocks() == before
del more
assert blocks() == before
del looks[0]
assert blocks() == set(places[1:])
del looks[0]
assert blocks() == set(places[1:])
for address in places[1:]:
    core._cuda_cudaCachingAllocator_raw_delete(address)
assert not blocks()
assert torch.equal(outside.cpu(), large)

# Mistakes are errors that say what was wrong.
raises(RuntimeError, lambda: core._cuda_getCheckpointState(0, (1 << 40, 0)))
raises(RuntimeError, lambda: core._cuda_checkPoolLiveAllocations(0, (1 << 40, 0), set()))
raises(RuntimeError, lambda: core._cuda_setCheckpointPoolState(0, None, [], []))
for _ in range(2):
    core._cuda_releasePool(0, pool)
del outside
gc.collect()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
