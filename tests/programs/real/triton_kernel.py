"""A kernel of Triton's, on tensors of PyTorch's that are made and dropped in the loop."""

import torch
import triton
import triton.language as tl

from loop import timed


@triton.jit
def combine(y, x, count, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside)
    tl.store(y + at, value * 3 + value // 7 - step, mask=inside)


def body(scale):
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(100):
        count = 1000 + (1024 << step % 11) * scale
        x = torch.arange(count, device="cuda")
        y = torch.empty_like(x)
        combine[(triton.cdiv(count, 1024),)](y, x, count, step, BLOCK=1024)
        total += y.sum()
    return int(total)


print("sum:", timed(body))
