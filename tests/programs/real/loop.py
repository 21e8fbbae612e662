"""How the programs here time their loop, or run it for long."""

import math
import os
import pathlib
import sys
import time

# So many that a program's time from its start to its end shows its loop.
REPEATS = 25


# In a long run the sizes in use change from round to round.
SCALES = 4


def timed(body):
    """Runs `body` at scale 1, once to warm up, and then REPEATS times. Returns what it returned last. Where
    PROGRAM_ROUNDS says how many rounds, it is a long run; where there is PROGRAM_TURNS, somebody says when, and
    is told the times."""
    rounds = int(os.environ.get("PROGRAM_ROUNDS", 0))
    if rounds:
        return long(body, rounds)
    result = body(1)
    if "PROGRAM_TURNS" in os.environ:
        return take_turns(body, result)
    for _ in range(REPEATS):
        result = body(1)
    return result


def take_turns(body, result):
    """Runs `body` for each line of input, and prints the time."""
    print("turns", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        result = body(1)
        print(f"turn: {time.perf_counter() - start:.9f}", flush=True)
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
