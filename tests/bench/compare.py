"""Runs the jobs of `jobs.py` under several allocators, each in a process of its own, alternating,
and prints a table: seconds, memory, and the losses side by side.

    python3 tests/bench/compare.py [--jobs a,b] [--allocators native,concertina] [--rounds N] [--steps N]

Needs a GPU, PyTorch, transformers, torchvision and peft (for the jobs that use them), and
`libconcertina.so` (see `scripts/concertina`). `native` runs twice a round where losses are compared,
so that its own spread stands beside the difference. `limited` is concertina once more, under a limit of
1.02 times what it had in use at most before.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
JOBS = ["gpt2_varlen", "llama_lora_ckpt", "resnet_multiscale", "llama_serve", "prefetch_streams"]
# What `limited` may hold, over what was live.
TIGHT = 1.02


def run(job, allocator, steps, limit):
    command = [sys.executable, str(HERE / "jobs.py"), job, "--allocator", allocator]
    command += ["--steps", str(steps)] if steps else []
    command += ["--limit", str(limit)] if limit else []
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{job} under {allocator} failed ({done.returncode}): {done.stderr[-2000:]}", flush=True)
        return None
    return json.loads(lines[-1])


def spread(a, b):
    """The largest difference of two series of losses, relative to the loss."""
    return max(abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b))


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--jobs", default=",".join(JOBS))
    p.add_argument("--allocators", default="native,expandable,async,concertina,limited")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--steps", type=int)
    p.add_argument("--limit", type=float, help="MiB that the allocator may hold")
    p.add_argument("--json", help="also write every run to this file")
    a = p.parse_args()
    allocators = a.allocators.split(",")
    everything, failed = [], False
    for job in a.jobs.split(","):
        runs = {name: [] for name in allocators}
        for _ in range(a.rounds):
            for name in allocators:
                limit = a.limit
                if name == "limited":
                    if not runs.get("concertina"):
                        continue
                    limit = math.ceil(TIGHT * runs["concertina"][0]["peak_live_mib"])
                result = run(job, name.replace("limited", "concertina"), a.steps, limit)
                failed |= result is None
                if result:
                    runs[name].append(result)
                    everything.append(result)
        print(f"\n{job}")
        print(f"{'allocator':12} {'step ms':>9} {'first s':>8} {'total s':>8} {'live MiB':>9} "
              f"{'reserved':>9} {'ratio':>7} {'device':>8} {'loss differs':>13}  last loss")
        base = runs.get("native") or []
        for name, results in runs.items():
            if not results:
                continue
            def median(key):
                return statistics.median(r[key] for r in results)
            if name == "native":
                differs = spread(base[0]["losses"], base[1]["losses"]) if len(base) > 1 else 0.0
            else:
                differs = spread(base[0]["losses"], results[0]["losses"]) if base else float("nan")
            live, held = median("peak_live_mib"), median("peak_reserved_mib")
            print(f"{name:12} {median('step_ms_median'):9.2f} {median('first_s'):8.2f} "
                  f"{median('total_s'):8.2f} {live:9.0f} {held:9.0f} {held / live:7.4f} "
                  f"{median('device_used_mib'):8.0f} {differs:13.2e}  {results[0]['losses'][-1]!r}", flush=True)
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps(everything, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
