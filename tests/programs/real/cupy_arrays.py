"""CuPy's arrays: temporaries of many sizes, and products of matrices.

    cupy_arrays.py pool|waits|async|off       memory by CuPy's own pool, by the same with a wait for the
                                              GPU at each release, by cudaMallocAsync, or by cudaMalloc
"""

import sys

import cupy

from loop import timed


class Waits(cupy.cuda.MemoryHook):
    """The wait that cudaFree promises: what this costs, no allocator under cudaFree can save."""

    name = "waits"

    def free_preprocess(self, **_):
        cupy.cuda.runtime.deviceSynchronize()


ALLOCATORS = {
    "pool": lambda: None,
    "waits": lambda: Waits().__enter__(),
    "async": lambda: cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc),
    "off": lambda: cupy.cuda.set_allocator(None),
}
ALLOCATORS[sys.argv[1]]()


def body(scale):
    total = cupy.zeros((), dtype=cupy.int64)
    for step in range(100):
        count = 1000 + (1024 << step % 11) * scale
        x = cupy.arange(count, dtype=cupy.int64)
        y = x * 3 + (x // 7) - step
        total += (y % 1000).sum()
        edge = 64 * (scale + step % 4)
        a = cupy.full((edge, edge), step % 5, dtype=cupy.float32)
        total += (a @ a).sum().astype(cupy.int64)
    return int(total)


print("sum:", timed(body))
