# Nothing is lost on the way through memory that is used again and again: sizes around every border,
# with blocks freed and split in between.
import torch
from case import MIB, pattern, to_gpu

SIZES = [1, 511, 512, 513, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 3, 20 * MIB, 33 * MIB]
for around in range(3):
    kept = []
    for number, size in enumerate(SIZES):
        host = pattern(size, seed=around * 100 + number)
        there = to_gpu(host)
        if number % 3 == around:
            del there
            there = to_gpu(host)
        kept.append((host, there, there.clone()))
    for host, there, again in kept[::2]:
        assert torch.equal(there.cpu(), host), f"{host.numel()} bytes"
        del there, again
    kept = kept[1::2]
    more = [to_gpu(pattern(size)) for size in SIZES[::2]]
    for host, there, again in kept:
        assert torch.equal(there.cpu(), host), f"{host.numel()} bytes"
        assert torch.equal(again.cpu(), host), f"{host.numel()} bytes, copied on the GPU"
    for size, there in zip(SIZES[::2], more):
        assert torch.equal(there.cpu(), pattern(size)), f"{size} bytes, later"
