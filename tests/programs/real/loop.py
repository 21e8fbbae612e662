"""How the programs here time their loop, or run it for long."""

import math
import os
import pathlib
import statistics
import sys
import time

# Many: a machine that others use as well is slow for moments.
REPEATS = 25


# In a long run the sizes in use change from round to round.
SCALES = 4


def timed(body):
    """Runs `body` at scale 1, once to warm up, and then for the median of its times, which is printed.
    Returns what it returned last. Where PROGRAM_ROUNDS says how many rounds, it is a long run; where there is
    PROGRAM_TURNS, it runs for each line of input, and each time is printed."""
    rounds = int(os.environ.get("PROGRAM_ROUNDS", 0))
    if rounds:
        return long(body, rounds)
    result = body(1)
    turns = "PROGRAM_TURNS" in os.environ
    if turns:
        print("turns", flush=True)
    times = []
    for _ in sys.stdin if turns else range(REPEATS):
        start = time.perf_counter()
        result = body(1)
        times.append(time.perf_counter() - start)
        if turns:
            print(f"turn: {times[-1]:.9f}", flush=True)
    if not turns:
        print(f"loop: {statistics.median(times):.9f}", flush=True)
    return result


def long(body, rounds):
    """Runs `body` for many rounds at changing scales, and makes the file PROGRAM_WARM once each scale has
    been there. A scale's result has to be the same each time. Returns the sum of the results."""
    results = {}
    for number in range(rounds):
        scale = 1 + number % SCALES
        result = body(scale)
        first = results.setdefault(scale, result)
        if not math.isclose(result, first, rel_tol=1e-4):
            print(f"wrong in round {number}: {result}, and first {first}")
        if number == SCALES and "PROGRAM_WARM" in os.environ:
            pathlib.Path(os.environ["PROGRAM_WARM"]).touch()
    return sum(results.values())
