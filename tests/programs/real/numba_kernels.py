"""Numba's own kernels on arrays that are made and dropped in the loop."""

import numpy

# Numba's CUDA part names this, and newer releases of NumPy have left it out.
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack

from numba import cuda  # noqa: E402

from loop import SCALES, timed

SOURCE = numpy.arange((1 << 18) * SCALES + 1000, dtype=numpy.int64)


@cuda.jit
def combine(y, x, step):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[i] * 3 + x[i] // 7 - step


def body(scale):
    total = 0
    for step in range(60):
        count = 1000 + (1024 << step % 9) * scale
        x = cuda.to_device(SOURCE[:count])
        y = cuda.device_array(count, numpy.int64)
        combine[(count + 255) // 256, 256](y, x, step)
        total += int(y.copy_to_host().sum())
    return total


print("sum:", timed(body))
