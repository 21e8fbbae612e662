#!/usr/bin/env python3
"""Runs small PyTorch programs under concertina, each in a process of its own, and says which did not
do what they promise.

    run.py [options] [CASE...]

Without --gpu the real PyTorch wheel runs against a simulated GPU: the torch of scripts/torch-env.sh,
the stand-ins of scripts/standin.sh, and the library as cargo builds it, each made where it is not
there. With --gpu it is this python's torch, the real driver and the library in CONCERTINA_LIBRARY or
target/release.

A case is a file of tests/torch/cases. It passes when it ends with status 0, nothing of concertina's
stands on standard error that it has not announced, the statistics written at exit are whole, and the
simulated GPU has seen nothing that a real one would punish. It runs once for each way to attach, but for
`install` where it runs as `plain` (`--attach install` has them all run so):

    plain     the two lines of PyTorch's pluggable allocator, and then the case
    install   concertina.install(), and then the case
    native    PyTorch's own allocator, to see that the case itself is right

With --attach run, cases that can be installed run unmodified, as under `concertina run`.

Lines in a case that begin with `#:` say how it is run:

    #: attach plain install     the ways to attach; these two where nothing is said
    #: memory 256               MiB of the simulated GPU; 1024
    #: devices 2                how many simulated GPUs; 1. On fewer real ones the case cannot run
    #: env NAME=VALUE           a variable of the environment
    #: says TEXT                standard error has to have TEXT in one of concertina's lines
    #: only sim                 or gpu: it makes no sense on the other
    #: torch 2.11               it needs this version of torch or a newer one
    #: needs transformers       it needs this Python module
    #: ends 3                   the exit status; 0
    #: core                     it is one of the few that every release has to pass; --core runs these alone
    #: alone                    on a real GPU it needs all memory that is free: after the others, by itself

A case imports what it needs of `case.py`. One that cannot run here is named, with why; --strict makes
that a failure.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SECONDS = 180

ATTACH = {
    "plain": """\
import torch
alloc = torch.cuda.memory.CUDAPluggableAllocator({library!r}, "concertina_malloc", "concertina_free")
torch.cuda.memory.change_current_allocator(alloc)
""",
    "install": "import concertina; concertina.install()\n",
    "native": "",
    "run": "",
}


class Case:
    """A file, and what it says about itself."""

    def __init__(self, path):
        self.path = path
        self.name = path.stem
        self.text = path.read_text()
        self.attach = ["plain", "install"]
        self.memory = 1024
        self.devices = 1
        self.env = {}
        self.says = []
        self.only = None
        self.torch = (0,)
        self.needs = []
        self.ends = 0
        self.alone = False
        self.core = False
        for line in re.findall(r"^#: *(.*?) *$", self.text, re.MULTILINE):
            word, _, rest = line.partition(" ")
            match word:
                case "attach":
                    self.attach = rest.split()
                case "memory":
                    self.memory = int(rest)
                case "devices":
                    self.devices = int(rest)
                case "env":
                    name, _, value = rest.partition("=")
                    self.env[name] = value
                case "says":
                    self.says.append(rest)
                case "only":
                    self.only = rest
                case "torch":
                    self.torch = tuple(map(int, rest.split(".")))
                case "needs":
                    self.needs.append(rest)
                case "core":
                    self.core = True
                case "alone":
                    self.alone = True
                case "ends":
                    self.ends = int(rest)
                case _:
                    raise SystemExit(f"run.py: {path}: nothing is known of `#: {line}`")
        if unknown := set(self.attach) - set(ATTACH):
            raise SystemExit(f"run.py: {path}: no way to attach is called {unknown.pop()}")


class Place:
    """Where cases run: on the simulated GPU, or on a real one."""

    def __init__(self, options):
        self.gpu = options.gpu
        self.side = "gpu" if self.gpu else "sim"
        self.known = options.known
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CONCERTINA_", "STANDIN_", "PYTORCH_"))
            # Without the last, what the cases import is compiled once: that takes longer than to import it.
            and name not in ("LD_PRELOAD", "RANK", "PYTHONDONTWRITEBYTECODE")
        }
        self.library = str(pathlib.Path(self.find_library(options)).resolve())
        self.python = options.python or self.find_python(options)
        if not self.gpu:
            standin = options.standin or output("scripts/standin.sh")
            paths = [standin, os.environ.get("LD_LIBRARY_PATH", "")]
            self.environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
            # The blank cuBLASLt has no algorithm to offer; cuBLAS does not ask for one.
            self.environment["DISABLE_ADDMM_CUDA_LT"] = "1"
        self.environment["CONCERTINA_LIBRARY"] = self.library
        self.environment["CONCERTINA_TEST_SIDE"] = self.side
        self.environment["PYTHONPATH"] = f"{ROOT / 'scripts'}:{HERE}"
        self.torch, self.devices = self.look()

    def find_library(self, options):
        if options.library:
            return options.library
        if self.gpu:
            built = ROOT / "target/release/libconcertina.so"
            return os.environ.get("CONCERTINA_LIBRARY", built)
        output("cargo", "build", "--locked", "--quiet", "--lib")
        target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
        return pathlib.Path(target, "debug/libconcertina.so")

    def find_python(self, options):
        if self.gpu:
            return sys.executable
        return output("scripts/torch-env.sh", options.torch)

    def look(self):
        """The version of torch, and how many devices it finds."""
        code = "import torch; print(torch.__version__, torch.cuda.device_count())"
        environment = self.environment | {"STANDIN_DEVICES": "64"}
        found = subprocess.run(
            [self.python, "-c", code], env=environment, capture_output=True, text=True
        )
        if found.returncode != 0:
            raise SystemExit(f"run.py: torch can't be used: {last_line(found.stderr)}")
        version, devices = found.stdout.split()
        if devices == "0":
            raise SystemExit("run.py: torch finds no GPU")
        return tuple(map(int, version.split("+")[0].split(".")[:2])), int(devices)

    def has(self, module):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", code], check=False).returncode == 0

    def cannot(self, case):
        """Why a case can't run here, or None."""
        if case.only not in (None, self.side):
            return f"it is for the {'simulated' if case.only == 'sim' else 'real'} GPU"
        if case.torch > self.torch:
            return f"it needs torch {'.'.join(map(str, case.torch))}"
        for module in case.needs:
            if not self.has(module):
                return f"{self.python} has no module {module}"
        if case.devices > self.devices:
            return f"it needs {case.devices} devices, and there are {self.devices}"
        return None

    def run(self, case, attach):
        """Runs a case; what was wrong, a line each, and what the case printed."""
        with tempfile.TemporaryDirectory() as scratch:
            program = pathlib.Path(scratch, f"{case.name}.{attach}.py")
            program.write_text(ATTACH[attach].format(library=self.library) + case.text)
            stats = pathlib.Path(scratch, "stats.json")
            violations = pathlib.Path(scratch, "violations")
            environment = self.environment | {
                "CONCERTINA_STATS": str(stats),
                "CONCERTINA_TEST_ATTACH": attach,
                "STANDIN_MEMORY_MB": str(case.memory),
                "STANDIN_DEVICES": str(case.devices),
                "STANDIN_VIOLATIONS": str(violations),
            }
            environment |= case.env
            if attach == "run":
                environment["LD_PRELOAD"] = self.library
                startup = ROOT / "scripts/concertina/startup"
                environment["PYTHONPATH"] = f"{startup}:{environment['PYTHONPATH']}"
            try:
                ended = subprocess.run(
                    [self.python, program],
                    env=environment,
                    cwd=scratch,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=SECONDS,
                )
            except subprocess.TimeoutExpired as late:
                streams = (late.stdout or b"", late.stderr or b"")
                printed = b"".join(streams).decode(errors="replace")
                return [f"it did not end within {SECONDS} s"], printed
            wrong = list(self.judge(case, attach, ended, stats))
            if violations.exists():
                wrong += [f"on a GPU: {line}" for line in violations.read_text().splitlines()]
            return wrong, ended.stdout + ended.stderr

    def judge(self, case, attach, ended, stats):
        if ended.returncode != case.ends:
            what = last_line(ended.stderr) or "nothing on standard error"
            yield f"exit status {ended.returncode}, wanted {case.ends}: {what}"
        if attach == "native":
            return
        said = [line for line in ended.stderr.splitlines() if line.startswith("concertina: ")]
        for line in said:
            if not any(text in line for text in (*case.says, *self.known)):
                yield f"it says: {line}"
        for text in case.says:
            if not any(text in line for line in said):
                yield f"it does not say: {text}"
        if stats.exists():
            try:
                json.loads(stats.read_text())["schema_version"]
            except (ValueError, KeyError) as error:
                yield f"the statistics at exit are not whole: {error!r}"
        elif ended.returncode >= 0 and case.env.get("CONCERTINA_DISABLE") != "1":
            yield "no statistics were written at exit"


def output(*command):
    """What a script of this project prints; its complaint ends this one."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"run.py: {command[0]} failed")
    return done.stdout.strip()


def last_line(text):
    """The line that says why a program ended: that of the last Python error, else the last one."""
    # concertina's own words stand wherever they fall.
    lines = [line for line in text.splitlines() if not line.startswith("concertina: ")]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    others = [line.strip() for line in lines if line.strip()]
    return next(reversed(errors or others), "")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="parts of names; all without")
    parser.add_argument("--core", action="store_true", help="only cases that say `#: core`")
    parser.add_argument("--gpu", action="store_true", help="on the real GPU of this machine")
    parser.add_argument("--attach", choices=list(ATTACH), help="only this way to attach")
    parser.add_argument("--torch", default="2.11.0", help="version of torch (without --gpu)")
    parser.add_argument("--python", help="a python with torch")
    parser.add_argument("--library", help="libconcertina.so")
    parser.add_argument("--standin", help="directory of the stand-ins")
    parser.add_argument("--jobs", type=int, help="cases at a time; 1 with --gpu, else one a core")
    parser.add_argument(
        "--known", action="append", default=[], metavar="TEXT",
        help="concertina may say lines with TEXT",
    )
    parser.add_argument("--strict", action="store_true", help="what can't run here fails")
    parser.add_argument("--verbose", action="store_true", help="what cases print, also if they pass")
    return parser.parse_args()


def report(place, options, jobs, runs, failed):
    """Runs `jobs` cases at a time and says how each went. Answers how many passed; the others' names join `failed`."""
    passed = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = [(run, pool.submit(place.run, *run)) for run in runs]
        for (case, attach), result in results:
            wrong, printed = result.result()
            name = f"{case.name} ({attach})"
            if wrong:
                failed.append(name)
            else:
                passed += 1
            print(f"{'FAIL' if wrong else 'PASS'} {name}", *wrong, sep="\n    ", flush=True)
            if wrong or options.verbose:
                print("".join(f"  | {line}\n" for line in printed.splitlines()), end="", flush=True)
    return passed


def main():
    options = arguments()
    paths = sorted(HERE.glob("cases/*.py"))
    wanted = [part.removesuffix(".py") for part in options.cases]
    for part in wanted:
        if not any(part in path.stem for path in paths):
            raise SystemExit(f"run.py: no case has {part!r} in its name")
    cases = [Case(path) for path in paths if not wanted or any(w in path.stem for w in wanted)]
    cases = [case for case in cases if case.core or not options.core]
    start, place = time.monotonic(), Place(options)
    passed, failed, skipped = 0, [], []
    runs = []
    for case in cases:
        if why := place.cannot(case):
            skipped.append(case.name)
            print(f"SKIP {case.name}: {why}", flush=True)
            continue
        ways = [way for way in case.attach if options.attach in (None, way)]
        # `run` installs it, too: what is left is no more than the two together.
        if options.attach is None and "plain" in ways and "install" in ways:
            ways.remove("install")
        if options.attach == "run" and "install" in case.attach:
            ways = ["run"]
        runs += [(case, way) for way in ways]
    jobs = options.jobs or (1 if place.gpu else os.cpu_count())
    alone = [run for run in runs if place.gpu and run[0].alone]
    together = [run for run in runs if run not in alone]
    for jobs, runs in (jobs, together), (1, alone):
        passed += report(place, options, jobs, runs, failed)
    where = "the GPU" if place.gpu else "the simulated GPU"
    version = ".".join(map(str, place.torch))
    print(
        f"torch {version} on {where}: {passed} passed, {len(failed)} failed, "
        f"{len(skipped)} cases could not be run, {time.monotonic() - start:.0f} s"
    )
    for name in failed:
        print(f"FAIL {name}")
    if failed or not passed or (options.strict and skipped):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
