"""Runs the jobs of `jobs.py` under several allocators, each in a process of its own, and prints a table:
seconds, memory, and the losses side by side.

    python3 tests/bench/compare.py [--jobs a,b] [--allocators native,concertina] [--rounds N] [--steps N]

Needs a GPU, PyTorch, transformers, torchvision and peft (for the jobs that use them), and
`libconcertina.so` (see `scripts/concertina`). All processes of a job are there at once and take turns, a
step each, on the same cores: what else runs on the machine slows all of them alike. `by step` is the median
of each step's time over that of the same step of the allocator named first; with several --rounds, of the
least that the step took in any. With --alone they run one after the other, for a GPU that does not hold all
of them. An allocator may be named twice: how far its two processes are apart is chance. `limited` is
concertina once more, under a limit of 1.02 times what it had in use at most before, and runs beside it.
`driver %` is how much of its steps but the first concertina spends in calls of the driver that it counts,
waiting included; the rest of its own time is the `blocks` of a step times what a pair takes (`scripts/bench.sh`).
"""

import argparse
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
JOBS = ["gpt2_varlen", "llama_lora_ckpt", "resnet_multiscale", "llama_serve", "prefetch_streams"]
# Processes that take turns do so on the same cores, so that none has the faster ones: as many as a program
# and PyTorch's thread of backward passes need, and as many again.
CORES = 4
# What `limited` may hold, over what was live.
TIGHT = 1.02


class Process:
    """One job under one allocator, which waits for its turns."""

    def __init__(self, job, allocator, steps, limit):
        self.name = f"{job} under {allocator}"
        command = [sys.executable, str(HERE / "jobs.py"), job, "--turns"]
        command += ["--allocator", allocator.replace("limited", "concertina")]
        command += ["--steps", str(steps)] if steps else []
        command += ["--limit", str(limit)] if limit else []
        self.errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        # Otherwise Python's dictionaries differ from process to process, and so do its times.
        env = os.environ | {"PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(command, text=True, env=env, **pipes)
        self.result = None

    def stay_on(self, cores):
        """From now on its threads run on these cores."""
        for thread in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), cores)
            except OSError:
                pass  # It has ended since.

    def go(self):
        """Has it take a step."""
        try:
            print(file=self.process.stdin, flush=True)
        except OSError:
            pass  # It has ended; what it said last is there to be read.

    def took(self):
        """Waits for its step. False once it has ended."""
        for line in self.process.stdout:
            if line.startswith("step "):
                return True
            if line.startswith("{"):
                self.result = json.loads(line)
        return False

    def end(self):
        """What it measured, or nothing where it failed."""
        status = self.process.wait()
        if status or self.result is None:
            self.errors.seek(0)
            print(f"{self.name} failed ({status}): {self.errors.read()[-2000:]}", flush=True)
            return None
        return self.result


def run(job, allocators, steps, limits, alone):
    """One result an allocator, in their order."""
    results = []
    for together in [[it] for it in allocators] if alone else [allocators]:
        processes = [Process(job, it, steps, limits.get(it)) for it in together]
        # The first step makes the model, which takes long and is not compared: all at once.
        for process in processes:
            process.go()
        going = [it for it in processes if it.took()]
        if len(going) > 1:
            cores = set(sorted(os.sched_getaffinity(0))[-CORES:])
            for process in going:
                process.stay_on(cores)
        while going:
            for process in list(going):
                process.go()
                if not process.took():
                    going.remove(process)
            # So that nobody has two turns in a row, or always comes after the same one.
            last = going[-1] if len(going) > 1 else None
            while last and going[0] is last:
                random.shuffle(going)
        results += [it.end() for it in processes]
    return results


def spread(a, b):
    """The largest difference of two series of losses, relative to the loss."""
    return max(abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b))


def numbered(names, at):
    """A name, and which of its processes it is if it is not the first."""
    before = names[:at].count(names[at])
    return f"{names[at]} {before + 1}" if before else names[at]


def by_step(results, others):
    """The median of the ratios of the same steps but the first. Of the rounds the least of each step counts:
    what else runs on the machine only ever adds."""
    mine, theirs = (
        [min(times) for times in zip(*(it["step_ms"][1:] for it in of))] for of in (results, others)
    )
    ratios = [a / b for a, b in zip(mine, theirs)]
    return statistics.median(ratios) if ratios else math.nan


def in_driver(results):
    """How much of the steps but the first went into calls of the driver, in hundredths; only concertina tells."""
    if results[0]["in_driver_s"] is None:
        return math.nan
    shares = [it["in_driver_s"] / (it["total_s"] - it["first_s"]) for it in results]
    return 100 * statistics.median(shares)


def show(job, runs, alone):
    """Prints the table of a job. What the device says to be used is told apart only where each was alone."""
    print(f"\n{job}")
    print(
        f"{'allocator':22} {'step ms':>9} {'by step':>8} {'first s':>8} {'total s':>8} {'live MiB':>9} "
        f"{'reserved':>9} {'ratio':>7} {'device':>8} {'blocks':>8} {'driver %':>8} {'loss differs':>13}  last loss"
    )
    base = next(iter(runs.values()))
    for name, results in runs.items():
        if not results:
            continue

        def median(key):
            return statistics.median(result[key] for result in results)

        others = runs["concertina once more"] if name == "limited" else base
        live, held = median("peak_live_mib"), median("peak_reserved_mib")
        differs = spread(base[0]["losses"], results[0]["losses"]) if base else math.nan
        print(
            f"{name:22} {median('step_ms_median'):9.2f} {by_step(results, others):8.3f} "
            f"{median('first_s'):8.2f} {median('total_s'):8.2f} {live:9.0f} {held:9.0f} {held / live:7.4f} "
            f"{median('device_used_mib') if alone else math.nan:8.0f} "
            f"{(median('blocks') or math.nan) / (results[0]['steps'] - 1):8.0f} {in_driver(results):8.3f} "
            f"{differs:13.2e}  {results[0]['losses'][-1]!r}",
            flush=True,
        )


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--jobs", default=",".join(JOBS))
    p.add_argument("--allocators", default="native,expandable,async,concertina,limited")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--alone", action="store_true", help="one process at a time")
    p.add_argument("--steps", type=int)
    p.add_argument("--limit", type=float, help="MiB that the allocator may hold")
    p.add_argument("--json", help="also write every run to this file")
    a = p.parse_args()
    names = a.allocators.split(",")
    first = [it for it in names if it != "limited"]
    if "limited" in names and "concertina" not in names:
        p.error("limited runs beside concertina, which is to be named as well")
    everything, failed = [], False
    for job in a.jobs.split(","):
        columns = [numbered(first, at) for at in range(len(first))]
        runs = {name: [] for name in columns}
        limits = {name: a.limit for name in first}
        for _ in range(a.rounds):
            for name, result in zip(columns, run(job, first, a.steps, limits, a.alone)):
                runs[name] += [result] if result else []
                failed |= result is None
            if "limited" in names and runs.get("concertina"):
                live = runs["concertina"][0]["peak_live_mib"]
                limits["limited"] = math.ceil(TIGHT * live)
                pair = run(job, ["concertina", "limited"], a.steps, limits, a.alone)
                for name, result in zip(("concertina once more", "limited"), pair):
                    runs.setdefault(name, []).extend([result] if result else [])
                    failed |= result is None
        show(job, runs, a.alone)
        everything += [result for results in runs.values() for result in results]
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps(everything, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
