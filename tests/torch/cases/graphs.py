# Several graphs that share a pool, that are replayed when what they made is let go of, that are captured
# while memory is short, that run out of it in the midst, and that go: what each makes is right, what lies
# around them stays as it was, and all memory comes back.
#: core
#: attach plain install native
#: memory 256
import gc

import torch
from case import ATTACH, GPU, MIB, pattern, raises

SIZE = 4 * MIB
torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(min(1.0, 250 * MIB / torch.cuda.mem_get_info()[1]))


def host(seed):
    return pattern(SIZE, seed)


def around():
    """Memory that is no graph's."""
    return [(seed, host(seed).cuda()) for seed in (71, 72, 73)]


def unharmed(tensors):
    return all(torch.equal(tensor.cpu(), host(seed)) for seed, tensor in tensors)


source = host(1).cuda()
torch.cuda.synchronize()
first, second, third = (torch.cuda.CUDAGraph() for _ in range(3))
side = torch.cuda.Stream()
with torch.cuda.graph(first):
    # Twenty times as much as there would be room for at once.
    for _ in range(20):
        much = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
        middle = source.clone()
        del much
    made = middle.clone()
    del middle
with torch.cuda.graph(second, pool=first.pool()):
    # On two streams, and let go of while the other still reads.
    main = torch.cuda.current_stream()
    inner = made.clone()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        beside = inner.clone()
        inner.record_stream(side)
    del inner
    other = made.clone()
    main.wait_stream(side)
    also = torch.cat([other[: SIZE // 2].clone(), other[SIZE // 2 :].clone()]) if GPU else other.clone()
for seed in (2, 3):
    kept = around()
    source.copy_(host(seed))
    first.replay()
    second.replay()
    torch.cuda.synchronize()
    for tensor in made, beside, other, also:
        assert torch.equal(tensor.cpu(), host(seed)), seed
    assert unharmed(kept)
    del kept

# What they made is let go of; they go on writing to where it was, and nobody else is there.
addresses = [tensor.data_ptr() for tensor in (made, beside, other, also)]
del made, beside, other, also, tensor
kept = around()
assert not any(it.data_ptr() <= at < it.data_ptr() + SIZE for _, it in kept for at in addresses)
for seed in (4, 5):
    source.copy_(host(seed))
    first.replay()
    second.replay()
torch.cuda.synchronize()
assert unharmed(kept)

# One goes; the other has its memory still.
first.reset()
del first
gc.collect()
torch.cuda.empty_cache()
more = around()
second.replay()
torch.cuda.synchronize()
assert unharmed(kept) and unharmed(more)
del more, second
gc.collect()
torch.cuda.empty_cache()

# Memory runs out inside a capture: an error like any other, and life goes on.
held = []
failed = torch.cuda.CUDAGraph()


def too_much():
    with torch.cuda.graph(failed):
        held.append(source.clone())
        held.append(torch.empty(300 * MIB, dtype=torch.uint8, device="cuda"))


error = raises(torch.OutOfMemoryError, too_much)
assert "CUDA out of memory." in str(error)
del failed, error
held.clear()
gc.collect()
torch.cuda.synchronize()
assert unharmed(kept) and unharmed(around())
# What is cached, and what another graph needs, leave just room enough.
cached = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
del cached
with torch.cuda.graph(third):
    large = torch.empty(150 * MIB, dtype=torch.uint8, device="cuda")
    large[:SIZE].copy_(source)
    result = large[:SIZE].clone()
source.copy_(host(9))
third.replay()
torch.cuda.synchronize()
assert torch.equal(result.cpu(), host(9)) and unharmed(kept)
del large, result, third, kept, source
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == 0
if ATTACH != "native" or GPU:
    assert torch.cuda.memory_reserved() == 0
