#!/usr/bin/env python3
"""Runs the jobs of tests/several_gpus on two GPUs, under PyTorch's own allocators and under concertina.

    python3 tests/several_gpus/run.py [JOB...] [--rounds N] [--under NAME...] [-o FILE]

One line a run, then a table; FILE gets every figure as JSON. Needs two GPUs, PyTorch with NCCL, and the command
`concertina` (the one beside CONCERTINA_LIBRARY, else target/release). A run that takes longer than five minutes
hangs, which fails it.
"""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIBRARY = pathlib.Path(os.environ.get("CONCERTINA_LIBRARY", ROOT / "target/release/libconcertina.so"))
JOBS = (
    "ddp fsdp1 fsdp2 tensor_parallel pipeline all_to_all graph send_receive with_accelerate with_lightning "
    "bandwidth raw_ipc symmetric nccl_pool register_hook shared_tensors communicator_when_full"
).split()
UNDER = ["native", "expandable", "run", "install"]
EXTRA = {
    "register_hook": {
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1",
        "CONCERTINA_CONF": "expandable_segments:False",
    }
}
LIMIT = 300


def command(job, under, port):
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        str(HERE / "jobs.py"), job,
    ]
    if under == "run":
        return [str(LIBRARY.parent / "concertina"), "run", "--", *torchrun]
    return torchrun + (["--install"] if under == "install" else [])


def environment(job, under):
    env = dict(os.environ, **EXTRA.get(job, {}))
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "scripts"), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env["CONCERTINA_LIBRARY"] = str(LIBRARY)
    env["OMP_NUM_THREADS"] = "4"
    env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    env.pop("PYTORCH_ALLOC_CONF", None)
    if under == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return env


def run(job, under, port, limit):
    start = time.monotonic()
    child = subprocess.Popen(
        command(job, under, port), env=environment(job, under), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        return {"job": job, "failed": f"hangs: not done after {limit} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        words = [line for line in err.splitlines() if "Error" in line or "concertina:" in line]
        words = [line for line in words if "ChildFailedError" not in line] or words
        why = (words or err.splitlines() or ["no output"])[-1]
        return {"job": job, "failed": f"status {child.returncode}: {why[:300]}"}
    result = json.loads(lines[-1])
    result["seconds"] = round(time.monotonic() - start, 1)
    if result.get("right") is False or "get" in result or "open" in result:
        result["failed"] = "the result is wrong"
    return result


def print_table(found, under):
    """Step time, reserved and used memory of each job, under each allocator; the median of the rounds."""
    print(f"\n{'job':24}" + "".join(f"{name:>28}" for name in under))
    print(f"{'':24}" + f"{'step ms / reserved / used':>28}" * len(under))
    for job, results in found.items():
        cells = []
        for name in under:
            done = [it for it in results.get(name, []) if "failed" not in it]
            if len(done) < len(results.get(name, [])):
                cells.append("FAILED")
            elif not done:
                cells.append("-")
            else:
                steps = [it["step_ms"] for it in done if "step_ms" in it]
                step = f"{statistics.median(steps):.1f}" if steps else "-"
                memory = [round(statistics.median(it[key] for it in done)) for key in ("reserved_mib", "device_used_mib")]
                cells.append(f"{step} / {memory[0]} / {memory[1]}")
        print(f"{job:24}" + "".join(f"{cell:>28}" for cell in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=" ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turns")
    parser.add_argument("--under", nargs="+", choices=UNDER, default=UNDER)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds after which a run hangs")
    parser.add_argument("--port", type=int, default=29500, help="the first of the ports for torchrun")
    parser.add_argument("-o", "--out", type=pathlib.Path)
    options = parser.parse_args()
    unknown = set(options.jobs) - set(JOBS)
    if unknown:
        parser.error(f"no such job: {', '.join(sorted(unknown))}; there are {' '.join(JOBS)}")
    import torch

    if torch.cuda.device_count() < 2:
        print("SKIP: two GPUs are needed, and this machine has", torch.cuda.device_count())
        return 3
    found, port, failed = {}, options.port, 0
    for round_ in range(options.rounds):
        for job in options.jobs or JOBS:
            for under in options.under:
                if job == "bandwidth" and under == "run":
                    continue  # there both are the pool's memory
                port += 1
                result = run(job, under, port, options.limit)
                found.setdefault(job, {}).setdefault(under, []).append(result)
                print(under, json.dumps(result), flush=True)
                # PyTorch's expandable segments cannot do everything that its own default can.
                failed += "failed" in result and under in ("run", "install")
                if options.out:
                    options.out.write_text(json.dumps(found, indent=1))
    print_table(found, options.under)
    print(f"\n{failed} runs under concertina failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
