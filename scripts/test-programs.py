#!/usr/bin/env python3
"""Runs real programs on this machine's GPU, bare and with the library preloaded in turn, checks that
they say the same, and prints their times side by side.

    test-programs.py [options] [PROGRAM...]
    test-programs.py --long ROUNDS [PROGRAM...]
    test-programs.py --soak SECONDS [--library FILE]

The programs are those of tests/programs/real: loops in CUDA C, with the runtime linked in and as a
library, work that fails, cuBLAS, cuDNN, CuPy, Numba, JAX, Triton and PyTorch. PROGRAMs choose some by
their names, or several by the beginning of those; `--list` names all. One whose compiler, library or
Python module is not here is named with what is missing, and counts as not run.

With --long, each program repeats its loop ROUNDS times, with sizes that change from round to round, once
bare and once preloaded: what they say has to be the same, and nothing that the preloaded process keeps may
grow. A thousand rounds take from some seconds to some minutes.

With --soak, a load that changes from round to round and storms that take all memory run for so long
each, bare (a quarter of it), strict and relaxed: nothing that the process keeps may grow.

A program prints what it computed, which has to be the same in every run (numbers after a ~ to four
digits), and times its loop. For that a bare process, a preloaded one and a second bare one are there at
once and take turns, a loop each, so that what else runs on the machine slows all of them alike; then three
others do, as no two processes are quite as fast. A ratio is the median of the groups' medians, preloaded
over bare, and after it in brackets stands that of the two bare ones, which is chance. What a program with
the pool under it is to be as fast as, such as the same program with a pool of its own, takes turns, too.
`whole` is the time of a run from its start to its end, of pairs of runs by themselves, and `in its calls`
what of that, preloaded, was spent allocating and freeing, waits for the GPU included. Needs no Rust.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tests" / "programs" / "real"
# No run takes longer, unless it hangs; a long one has more.
SECONDS = 180
LONG = 1800

# Three of it are to fit on one device.
JAX = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
PLATFORM = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

# Name, what is run, the variables that it needs.
PROGRAMS = [
    ("start-static", ["start.cu", "static"], {}),
    ("start-shared", ["start.cu", "shared"], {}),
    ("malloc-static", ["temporaries.cu", "static", "malloc"], {}),
    ("malloc-shared", ["temporaries.cu", "shared", "malloc"], {}),
    ("async-static", ["temporaries.cu", "static", "async"], {}),
    ("async-shared", ["temporaries.cu", "shared", "async"], {}),
    ("driver", ["temporaries.cu", "static", "driver"], {}),
    ("kept", ["temporaries.cu", "static", "kept"], {}),
    ("threads-malloc", ["threads.cu", "static", "malloc"], {}),
    ("threads-async", ["threads.cu", "static", "async"], {}),
    ("fault-asked", ["fault.cu", "static", "asked"], {}),
    ("fault-unasked", ["fault.cu", "static", "unasked"], {}),
    ("fault-freed", ["fault.cu", "shared", "freed"], {}),
    ("cublas", ["blas.cu", "shared", "libcublas.so"], {}),
    ("cudnn", ["dnn.cu", "shared", "libcudnn.so"], {}),
    ("cupy-pool", ["cupy_arrays.py", "pool"], {}),
    ("cupy-waits", ["cupy_arrays.py", "waits"], {}),
    ("cupy-async", ["cupy_arrays.py", "async"], {}),
    ("cupy-off", ["cupy_arrays.py", "off"], {}),
    ("numba", ["numba_kernels.py"], {}),
    ("jax", ["jax_training.py"], JAX),
    ("jax-waits", ["jax_training.py", "waits"], JAX),
    ("jax-platform", ["jax_training.py"], PLATFORM),
    ("triton", ["triton_kernel.py"], {}),
    ("torch", ["torch_training.py"], {}),
    ("torch-expandable", ["torch_training.py"], EXPANDABLE),
    ("torch-uncached", ["torch_training.py"], UNCACHED),
]

# The Python modules that a program needs besides its own name's.
MODULES = {
    "cupy_arrays.py": ["cupy"],
    "numba_kernels.py": ["numba", "numba.cuda", "numpy"],
    "jax_training.py": ["jax", "jaxlib"],
    "triton_kernel.py": ["triton", "torch"],
    "torch_training.py": ["torch"],
}

# What programs without a pool of their own are to be as fast as, once the pool is under them: these, bare.
BESIDE = {
    "cupy-off": ["cupy-pool", "cupy-waits"],
    "jax-platform": ["jax", "jax-waits"],
    "torch-uncached": ["torch"],
}


class Missing(Exception):
    """What a program needs and this machine lacks."""


def library_directories():
    """Where NVIDIA's libraries may be: pip's packages of this Python, and the toolkit."""
    directories = []
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        directories += sorted(pathlib.Path(place).glob("*/lib"))
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    toolkit = pathlib.Path(nvcc).resolve().parent.parent
    directories += [toolkit / "lib64", toolkit / "targets" / "x86_64-linux" / "lib"]
    return [path for path in directories if path.is_dir()]


def find_library(name, directories):
    for directory in [*directories, pathlib.Path("/usr/lib/x86_64-linux-gnu")]:
        for path in sorted(directory.glob(name + "*")):
            return path
    raise Missing(f"no {name}")


def find_nvcc():
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(found, os.X_OK):
        raise Missing("no nvcc")
    return found


def has_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def command(what, work):
    """The command of a program, which is built first if it has to be."""
    source, *arguments = what
    if source.endswith(".py"):
        for name in MODULES[source]:
            if not has_module(name):
                raise Missing(f"no Python module {name}")
        return [sys.executable, str(SOURCES / source), *arguments]
    nvcc = find_nvcc()
    runtime, *arguments = arguments
    built = work / f"{pathlib.Path(source).stem}-{runtime}"
    link = ["-lcuda", "-Xlinker", "--allow-shlib-undefined"]
    if arguments and arguments[0].startswith("lib"):
        # By way of the linker's own option: nvcc knows libraries by the end `.so`, and pip's end in a version.
        library = find_library(arguments.pop(0), library_directories())
        link += ["-Xlinker", str(library)]
    if not built.exists():
        flags = "-pthread,-std=gnu11" if source.endswith(".c") else "-pthread"
        done = subprocess.run(
            [nvcc, "-O2", "-arch=native", "-cudart", runtime, "-Xcompiler", flags]
            + ["-o", built, SOURCES / source, *link],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise Missing(f"nvcc cannot build {source}: {said[-300:]}")
    return [str(built), *arguments]


def clean_environment():
    """The environment without settings of ours and of PyTorch's allocator."""
    others = ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", *EXPANDABLE, *UNCACHED, *JAX, *PLATFORM)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CONCERTINA_") and name not in others
    }


class Watch:
    """What a process keeps, looked at from outside while it runs: the most of each in the first and in
    the second half of the time since its loop was warm."""

    EVERY = 0.05
    # No less is a half.
    LOOKS = 20
    # What a process holds, and by how much that may vary.
    KINDS = {
        "bytes held by the pool": 32 << 20,
        "chunks held by the pool": 64,
        "file descriptors": 8,
        "mappings of the process": 256,
        "bytes of the process's memory": 64 << 20,
    }

    def __init__(self, process, warm, stats):
        self.process, self.warm, self.stats = process, warm, stats
        self.looks = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while self.process.poll() is None:
            if self.warm.exists():
                try:
                    self.looks.append(self.look())
                except (OSError, ValueError, LookupError):
                    pass  # It has just ended, has not written yet, or wrote while a device was busy.
            time.sleep(self.EVERY)

    def look(self):
        there = pathlib.Path(f"/proc/{self.process.pid}")
        counters = [device["memory_stats"] for device in json.loads(self.stats.read_text())["devices"]]
        return (
            sum(counter["reserved_bytes.all.current"] for counter in counters),
            sum(counter["segment.all.current"] for counter in counters),
            len(list((there / "fd").iterdir())),
            len((there / "maps").read_text().splitlines()),
            int((there / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        )

    def grown(self):
        """What grew, a line each, and what was held at the end."""
        self.thread.join()
        half = len(self.looks) // 2
        if half < self.LOOKS:
            return [f"only {len(self.looks)} looks at the process since its loop was warm: more rounds"], []
        first, second = (map(max, zip(*part)) for part in (self.looks[:half], self.looks[half:]))
        wrong, held = [], []
        for (kind, slack), before, after in zip(self.KINDS.items(), first, second):
            held.append(f"{kind} {after}")
            if after > before * 5 // 4 + slack:
                wrong.append(f"{kind}: {before} in the first half, {after} in the second")
        return wrong, held


def environment_of(command, variables, library, stats, conf):
    """What a run of a program has in its environment; its statistics are to be new."""
    environment = clean_environment() | variables
    if command[0] != sys.executable:
        # Python's packages find their own.
        places = [environment.get("LD_LIBRARY_PATH"), *map(str, library_directories())]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, places))
    stats.unlink(missing_ok=True)
    if library:
        environment["LD_PRELOAD"] = str(library)
        environment |= {"CONCERTINA_STATS": str(stats), "CONCERTINA_CONF": conf}
    return environment


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


class Run:
    """One run of a program; a long one if a number of rounds is named."""

    def __init__(self, command, variables, library, stats, conf, seconds=SECONDS, rounds=0):
        environment = environment_of(command, variables, library, stats, conf)
        self.watch = None
        if rounds:
            warm = stats.with_name("warm")
            warm.unlink(missing_ok=True)
            environment |= {"PROGRAM_ROUNDS": str(rounds), "PROGRAM_WARM": str(warm)}
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, **PIPES)
        if rounds and library:
            self.watch = Watch(process, warm, stats)
        try:
            out, self.errors = process.communicate(timeout=seconds)
            status = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"did not end in {seconds} s"
            process.kill()
            out, self.errors = process.communicate()
        self.whole = time.perf_counter() - start
        self.said = [*out.splitlines(), status]
        self.ended = status == "exit status 0"
        self.pooled, self.inside = served(stats) if library else (0, 0)


class Player:
    """A process of a program that runs its loop when it is told to."""

    def __init__(self, command, variables, library, stats, conf):
        environment = environment_of(command, variables, library, stats, conf)
        # Python's own dice.
        environment |= {"PROGRAM_TURNS": "1", "PYTHONHASHSEED": "0"}
        # A pipe that is not read yet could fill.
        self.written = tempfile.TemporaryFile("w+")
        pipes = PIPES | {"stdin": subprocess.PIPE, "stderr": self.written}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.said, self.times = [], []
        # A process that hangs ends all the same, and then says less than it should.
        self.timer = threading.Timer(SECONDS, self.process.kill)
        self.timer.start()

    def is_ready(self):
        """Waits until its loop is warm; false where it has none."""
        return self.reads("turns")

    def reads(self, beginning):
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line
            self.said.append(line.rstrip("\n"))
        return None

    def play(self):
        """Runs its loop once; false where it has ended."""
        try:
            print(file=self.process.stdin, flush=True)
        except OSError:
            pass  # Ended, as its output says.
        line = self.reads("turn: ")
        if line:
            self.times.append(float(line.split()[1]))
        return line is not None

    def end(self):
        out, _ = self.process.communicate()
        self.timer.cancel()
        self.written.seek(0)
        self.errors = self.written.read()
        self.said += [*out.splitlines(), f"exit status {self.process.returncode}"]


def mix(order):
    """Another order, in which none has two turns in a row, nor always comes after the same one."""
    last = order[-1]
    while order[0] is last:
        random.shuffle(order)


def take_turns(name, command_of, options, work):
    """The times of a program's loop, preloaded, bare and bare once more, and of others beside it, by name,
    and what was wrong."""
    ways = {"bare": (name, None), "preloaded": (name, options.library), "again": (name, None)}
    others = {other: (other, None) for other in BESIDE.get(name, [])}
    players = {
        way: Player(*command_of(program), library, work / f"{way}.json", options.conf)
        for way, (program, library) in (ways | others).items()
    }
    order = list(players.values())
    began = time.perf_counter()
    if all([player.is_ready() for player in order]):
        while len(order[0].times) < options.turns and all([player.play() for player in order]):
            mix(order)
            if time.perf_counter() - began > SECONDS / 2:
                break
    wrong = []
    for way, player in players.items():
        player.end()
        same = way in others or agree(players["bare"].said, player.said)
        if not same or player.process.returncode != 0:
            wrong.append(f"taking turns, {way}: {player.said}; bare: {players['bare'].said}")
            wrong += [f"    {line}" for line in player.errors.splitlines()[-8:]]
    return {way: player.times for way, player in players.items()}, wrong


def served(stats):
    """How many allocations the pools served, and the seconds that the program spent in its calls."""
    if not stats.exists():
        return 0, 0
    told = json.loads(stats.read_text())
    counters = [device.get("memory_stats", {}) for device in told["devices"]]
    calls = told["calls"].values()
    return (
        sum(counter.get("allocation.all.allocated", 0) for counter in counters),
        sum(call["nanoseconds"] or 0 for call in calls) / 1e9,
    )


def agree(one, other):
    """Whether two runs said the same."""
    if len(one) != len(other):
        return False
    near = re.compile(r"~(\S+)")
    for a, b in zip(one, other):
        if near.sub("~", a) != near.sub("~", b):
            return False
        for x, y in zip(near.findall(a), near.findall(b)):
            if abs(float(x) - float(y)) > 1e-4 * max(abs(float(x)), abs(float(y))):
                return False
    return True


def show(seconds):
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def ratio(pairs):
    return f"{statistics.median(after / before for before, after in pairs):.3f}" if pairs else "-"


def of_groups(groups, way, base="bare"):
    """How many times as long one loop takes as another."""
    ratios = [[b / a for a, b in zip(times[base], times[way])] for times in groups]
    ratios = [statistics.median(of) for of in ratios if of]
    return f"{statistics.median(ratios):.3f}" if ratios else "-"


def measure(name, command_of, options, work):
    """Runs one program in turn, bare and preloaded. Returns its row, lines on what it was beside, and what
    was wrong. `command_of` finds the command and the variables of a program."""
    command, variables = command_of(name)
    pairs, wrong, first = [], [], None
    began = time.perf_counter()
    stats = work / "stats.json"
    # A program that does little but start needs many.
    rounds = options.rounds * (5 if name.startswith("start") else 1)
    while len(pairs) < rounds and not wrong:
        if len(pairs) >= 2 and time.perf_counter() - began > options.seconds:
            break
        order = (None, options.library) if len(pairs) % 2 == 0 else (options.library, None)
        runs = {it: Run(command, variables, it, stats, options.conf) for it in order}
        bare, preloaded = runs[None], runs[options.library]
        first = first or bare
        pairs.append((bare, preloaded))
        for which, run in (("bare", bare), ("preloaded", preloaded)):
            if not run.ended or not agree(first.said, run.said):
                wrong.append(f"{which}: {run.said}; bare first: {first.said}")
                wrong += [f"    {line}" for line in run.errors.splitlines()[-8:]]
    groups = []
    while len(groups) < options.groups and not wrong and not name.startswith(("start", "fault")):
        times, wrong = take_turns(name, command_of, options, work)
        groups.append(times)
    loops = [pair for times in groups for pair in zip(times["bare"], times["preloaded"])]
    wholes = [(a.whole, b.whole) for a, b in pairs]
    loop, whole = medians(loops), medians(wholes)
    last = pairs[-1][1] if pairs else None
    row = [f"`{name}`", "no" if wrong else "yes" if pairs or groups else "-"]
    row += [str(last.pooled), show(last.inside)] if last else ["-", "-"]
    slower, chance = (of_groups(groups, way) for way in ("preloaded", "again"))
    row += [*map(show, loop), f"{slower} ({chance})" if loops else "-", str(len(loops))]
    row += [*map(show, whole), ratio(wholes), str(len(pairs))]
    beside = [
        f"{name} preloaded takes {of_groups(groups, 'preloaded', other)} of {other} bare"
        for other in (BESIDE.get(name, []) if loops else [])
    ]
    return "| " + " | ".join(row) + " |", beside, wrong


def medians(pairs):
    return [statistics.median(side) for side in zip(*pairs)] if pairs else [None, None]


def soak(options, work):
    """Runs the soak of tests/programs/preload for a while in each way. True if nothing was wrong."""
    ways = [(None, "bare"), (options.library, "free:strict"), (options.library, "free:relaxed")]
    good = True
    for kind in ("load", "storm"):
        for library, conf in ways:
            seconds = options.soak if library else max(options.soak // 4, 1)
            built = command(["../preload/soak.c", "shared", kind, f"{seconds}s"], work)
            run = Run(built, {}, library, work / "stats.json", conf, seconds + SECONDS)
            good &= run.ended
            pooled = f", {run.pooled} allocations from the pool" if library else ""
            print(f"{'passed' if run.ended else 'FAILED'} soak {kind} {conf}, {seconds} s{pooled}")
            print("\n".join(f"    {line}" for line in [*run.said, *run.errors.splitlines()]))
            sys.stdout.flush()
    return good


def run_long(name, command, variables, options, work):
    """Runs one program for many rounds, bare and preloaded. Returns its row and what was wrong."""
    stats = work / "stats.json"
    conf = ",".join(filter(None, [options.conf, "stats_interval_s:1"]))
    bare = Run(command, variables, None, stats, "", LONG, options.long)
    run = Run(command, variables, options.library, stats, conf, LONG, options.long)
    wrong, held = run.watch.grown()
    if not run.ended or not agree(bare.said, run.said):
        wrong.append(f"preloaded says {run.said}, and bare {bare.said}")
        wrong += [f"    {line}" for line in run.errors.splitlines()[-8:]]
    verdict = "FAILED" if wrong else "passed"
    return f"{verdict} {name}, {options.long} rounds, {run.pooled} from the pool; held: {', '.join(held)}", wrong


HEAD = """\
| program | same results | from the pool | in its calls | loop, bare | preloaded | ratio (chance) | turns \
| whole, bare | preloaded | ratio | pairs |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def means(text, name):
    """Whether what the command line says chooses a program."""
    return text == name if any(text == it for it, _, _ in PROGRAMS) else name.startswith(text)


def find_library_of_ours(wanted):
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    places = [target / kind / "libconcertina.so" for kind in ("release", "debug")]
    for path in places if not wanted else [pathlib.Path(wanted)]:
        if path.is_file():
            return path.resolve()
    where = wanted or places[0]
    sys.exit(f"test-programs.py: no library at {where}: build it with cargo build --release")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("programs", nargs="*", metavar="PROGRAM")
    option("--library", help="libconcertina.so; without it the one under the target directory")
    option("--rounds", type=int, default=5, help="pairs of whole runs; five times as many of start (5)")
    option("--seconds", type=float, default=10, help="then no pair of a program after the second (10)")
    option("--groups", type=int, default=3, help="groups of processes that take turns (3)")
    option("--turns", type=int, default=40, help="how often each process of a group runs its loop (40)")
    option("--conf", default="", help="CONCERTINA_CONF when preloaded, such as free:relaxed")
    option("--long", type=int, metavar="ROUNDS", help="this many rounds of each program instead")
    option("--soak", type=int, metavar="SECONDS", help="a changing load and storms instead, so long each")
    option("--list", action="store_true", help="name the programs and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(name for name, _, _ in PROGRAMS))
        return 0
    if min(options.rounds, options.groups) < 0 or options.rounds + options.groups == 0:
        parser.error("--rounds and --groups: 0 or more are wanted, and one of them more than 0")
    if options.turns < 1:
        parser.error("--turns: 1 or more is wanted")
    if options.long is not None and options.long < 8:
        parser.error("--long: 8 rounds or more are wanted")
    for text in options.programs:
        if not any(means(text, name) for name, _, _ in PROGRAMS):
            parser.error(f"no program begins with {text}; --list names all")
    options.library = find_library_of_ours(options.library)
    if options.soak is not None:
        if options.soak < 4:
            parser.error("--soak: 4 seconds or more are wanted")
        with tempfile.TemporaryDirectory() as directory:
            try:
                return 0 if soak(options, pathlib.Path(directory)) else 1
            except Missing as why:
                sys.exit(f"test-programs.py: the soak cannot run: {why}")

    if options.long is None:
        print(HEAD, flush=True)
    passed, failed, missing, beside = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)

        def command_of(name):
            what, variables = next((what, variables) for it, what, variables in PROGRAMS if it == name)
            return command(what, work), variables

        for name, _, _ in PROGRAMS:
            if options.programs and not any(means(text, name) for text in options.programs):
                continue
            if options.long is not None and name.startswith(("start", "fault")):
                continue  # They have no loop.
            try:
                if options.long is None:
                    row, lines, wrong = measure(name, command_of, options, work)
                    beside += lines
                else:
                    row, wrong = run_long(name, *command_of(name), options, work)
            except Missing as why:
                missing.append(name)
                print(f"not run: {name}: {why}", file=sys.stderr, flush=True)
                continue
            print(row, flush=True)
            (failed if wrong else passed).append(name)
            if wrong:
                # At once, so that it is seen even if the run is ended early.
                print(f"FAILED {name}", *(f"    {line}" for line in wrong), sep="\n", file=sys.stderr, flush=True)
    print("", *beside, sep="\n")
    print(f"on the GPU: {len(passed)} passed, {len(failed)} failed, {len(missing)} not run")
    for what, names in (("FAILED", failed), ("not run", missing)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
