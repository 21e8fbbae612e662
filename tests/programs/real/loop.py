"""How the programs here time their loop."""

import statistics
import time

# Many: a machine that others use as well is slow for moments.
REPEATS = 25


def timed(body):
    """Runs `body` once to warm up, and then for the median of its times, which is printed. Returns
    what it returned last."""
    body()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = body()
        times.append(time.perf_counter() - start)
    print(f"loop: {statistics.median(times):.9f}", flush=True)
    return result
