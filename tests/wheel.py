#!/usr/bin/env python3
"""Makes a wheel, installs it as a user would, and tries what it brings: the command, the module,
`python -m concertina` and `concertina run`, without torch and with the real one on the simulated GPU.

    tests/wheel.py [--gpu] [TEST...]

The library and the command are those that cargo builds for tests. Nothing but the new environment's
own programs is on the PATH of what is tried, so no compiler either.

With --gpu it is this python's torch on the real GPU, and the library in CONCERTINA_LIBRARY or
target/release with the command beside it.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPU = "--gpu" in sys.argv

# Says all that a program can see of how it was started.
SEEN = """\
import atexit, pickle, sys
class Thing: pass
def late(): print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.modules["__main__"].__name__)
atexit.register(late)
names = {name: str(value) for name, value in globals().items() if not callable(value)}
print(__file__, __name__, sys.argv, sys.path, sorted(names), __package__, type(__loader__))
try:
    import torch
except ImportError as error:
    print(error)
"""


SPAWNS = """\
import multiprocessing
def train(): import train
if __name__ == "__main__":
    train()
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
"""

# Workers that are forked from a process which uses the GPU, and workers that are spawned.
LOADS = """\
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    import train
    for how in "fork", "spawn":
        loader = DataLoader(range(64), batch_size=8, num_workers=2, multiprocessing_context=how)
        assert sum(int(batch.sum()) for batch in loader) == sum(range(64))
"""

RANKS = """\
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
ranks = torch.ones(1)
torch.distributed.all_reduce(ranks)
assert ranks == 2
for rank in range(2):
    if rank == torch.distributed.get_rank():
        import train
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

# 8 MiB by cudaMalloc, beside a tensor of 4 MiB: both are the pool's, and PyTorch counts both.
OTHER = """\
import ctypes, torch
runtime = torch.cuda.cudart()
tensor = torch.ones(1 << 20, device="cuda")
library = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "cudart" in line))
address = ctypes.c_void_p()
assert library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(8 << 20)) == 0
both = torch.cuda.memory_allocated()
assert library.cudaFree(address) == 0
free, total = torch.cuda.mem_get_info()
assert total - free >= torch.cuda.memory_reserved()
print(both, torch.cuda.memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.current"])
"""

SETS = """\
import os, torch
library = os.environ["CONCERTINA_LIBRARY"]
own = torch.cuda.memory.CUDAPluggableAllocator(library, allocate, "concertina_free")
torch.cuda.memory.change_current_allocator(own)
"""

LIMITED = """\
import torch
def show(): print("%d of %d" % tuple(bytes >> 20 for bytes in torch.cuda.mem_get_info()))
show()
try: torch.empty(80 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error: print(str(error)[:19])
tensor = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
show()
"""


class Installed(unittest.TestCase):
    """What pip made of the wheel, and a directory to work in."""

    maxDiff = None

    @classmethod
    def setUpModule(cls):
        scratch = tempfile.TemporaryDirectory()
        unittest.addModuleCleanup(scratch.cleanup)
        cls.work = pathlib.Path(scratch.name).resolve()
        venv = cls.work / "venv"
        bare = ("CONCERTINA_", "STANDIN_", "PYTORCH_", "PYTHON", "LD_")
        cls.environment = {k: v for k, v in os.environ.items() if not k.startswith(bare)}
        cls.environment["PATH"] = str(venv / "bin")
        wheel = cls.wheel = built("scripts/wheel.sh", str(cls.work), CONCERTINA_LIBRARY=str(library()))
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = ["pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
        subprocess.run([venv / "bin" / pip[0], *pip[1:]], env=cls.environment, check=True)
        cls.python = venv / "bin/python"
        [cls.packages] = venv.glob("lib/python3*/site-packages")

    def run_(self, *command, **environment):
        """Standard output, standard error and exit status of a program of the new environment."""
        program = self.python.with_name(command[0])
        done = subprocess.run(
            [program, *command[1:]], env=self.environment | environment, cwd=self.work,
            capture_output=True, text=True, timeout=120,
        )
        return done.stdout, done.stderr, done.returncode

    def write(self, name, text):
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def same(self, *arguments, **environment):
        """Under concertina, either way, the program does what it does bare; what that is."""
        bare = self.run_("python", *arguments, **environment)
        ours = self.run_("python", "-m", "concertina", *arguments, **environment)
        self.assertEqual(ours, bare)
        self.same_run(*arguments, **environment)
        return bare

    def same_run(self, *arguments, **environment):
        """The same for `concertina run` alone, which takes Python's options, too."""
        bare = self.run_("python", *arguments, **environment)
        ours = self.run_("concertina", "run", "--", "python", *arguments, **environment)
        self.assertEqual(ours, bare)
        return bare


class WithoutTorch(Installed):
    def test_the_command(self):
        manifest = (ROOT / "Cargo.toml").read_text()
        out, _, status = self.run_("concertina", "--version")
        self.assertEqual(status, 0)
        self.assertIn(f'version = "{out.split()[1]}"', manifest)
        trace = ROOT / "tests/traces/prefetch_streams.gz"
        out, said, status = self.run_(
            "concertina", "replay", str(trace), "--driver", "sim", "--passes", "1", "--json"
        )
        self.assertEqual((said, status), ("", 0))
        self.assertGreater(json.loads(out)["peak_live_bytes"], 0)
        # It finds the library that came with it.
        out, said, status = self.run_(
            "concertina", "run", "python", "-c", "import os; print(os.environ['LD_PRELOAD'])"
        )
        self.assertEqual((said, status), ("", 0))
        self.assertEqual(out.strip(), str(self.packages / "concertina/libconcertina.so"))

    def test_the_header(self):
        """It comes with the module, which says where it is."""
        code = "import concertina; print(concertina.get_include())"
        out, said, status = self.run_("python", "-c", code)
        self.assertEqual((said, status), ("", 0))
        header = pathlib.Path(out.strip(), "concertina.h")
        self.assertEqual(header.parent, self.packages / "concertina/include")
        self.assertEqual(header.read_text(), (ROOT / "include/concertina.h").read_text())

    def test_the_command_of_other_layouts(self):
        """The command and the module find what came with them."""
        target = self.work / "target"
        out, said, status = self.run_(
            "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target), self.wheel
        )
        self.assertEqual(status, 0, said)
        # As pipx has it: a link to the command of an environment that is on no path.
        link = self.work / "applications/concertina"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(self.python.with_name("concertina"))
        print_all = ("import os, concertina; print(os.environ['LD_PRELOAD'], os.environ['PYTHONPATH'],"
                     " concertina.__version__, concertina.library())")
        for command, module in (target / "bin/concertina", target / "concertina"), (
            link, self.packages / "concertina",
        ):
            with self.subTest(command):
                packages = {"PYTHONPATH": str(module.parent)}
                done = subprocess.run(
                    [command, "run", self.python, "-c", print_all], capture_output=True, text=True,
                    env=self.environment | packages, cwd=self.work,
                )
                self.assertEqual((done.stderr, done.returncode), ("", 0))
                version = re.search('^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
                library = f"{module}/libconcertina.so"
                self.assertEqual(
                    done.stdout, f"{library} {module}/startup:{module.parent} {version} {library}\n"
                )
                done = subprocess.run(
                    [command, "replay", "--help"], capture_output=True, env=self.environment
                )
                self.assertEqual(done.returncode, 0)

    def test_the_module(self):
        code = "import concertina; print(concertina.library(), concertina.stats()['devices'])"
        out, said, status = self.run_("python", "-c", code)
        self.assertEqual((said, status), ("", 0))
        self.assertEqual(out, f"{self.packages / 'concertina/libconcertina.so'} []\n")

    def test_a_program_sees_what_it_sees_bare(self):
        self.write("programs/seen.py", SEEN)
        os.symlink("programs/seen.py", self.work / "link.py")
        self.write("package/__init__.py", "")
        self.write("package/seen.py", SEEN)
        self.write("directory/__main__.py", SEEN)
        for program in (["programs/seen.py"], ["link.py"], ["-m", "package.seen"], ["directory"]):
            with self.subTest(program):
                out, said, status = self.same(*program, "--one", "-m", "two words")
                self.assertEqual((said, status), ("", 0))
                self.assertIn("two words", out)
                self.assertIn("True __main__", out)

    def test_a_program_ends_as_it_ends_bare(self):
        for code, wanted in (
            ("import sys; sys.exit(7)", 7),
            ("raise SystemExit('a last word')", 1),
            ("def f(): raise ValueError('no')\ntry: f()\nexcept ValueError: 1 / 0", 1),
            ("not python", 1),
            ("raise KeyboardInterrupt", -2),
            ("import sys\nsys.excepthook = lambda *it: print('mine', it[0])\n1 / 0", 1),
        ):
            with self.subTest(code):
                out, said, status = self.same(self.write("ends.py", code))
                self.assertEqual(status, wanted)
        self.assertEqual(self.same("-m", "nothing.like.it")[2], 1)

    def test_a_sitecustomize_of_the_users(self):
        code = """if True:
            import sys
            try: import sitecustomize as it; print(it.__file__, it.__spec__.name)
            except ImportError as error: print(error, error.name)
            print(sys.path, "sitecustomize" in sys.modules)
            """
        out, said, status = self.same_run("-c", code)
        self.assertIn("No module named 'sitecustomize'", out)
        customs = {"PYTHONPATH": str(self.work / "customs")}
        self.write("customs/sitecustomize.py", "print('mine')\nimport sys; sys.path.append('more')")
        out, said, status = self.same_run("-c", code, **customs)
        self.assertTrue(out.startswith("mine\n"), out)
        self.assertIn(" sitecustomize\n", out)
        for broken in ("1 / 0", "import nothing.like.it", "not python"):
            with self.subTest(broken):
                self.write("customs/sitecustomize.py", broken)
                self.same_run("-c", code, **customs)

    def test_python_that_ignores_its_environment(self):
        self.write("program.py", "import os, sys; print(os.environ['HOME'], sys.flags)")
        for options in (["-I"], ["-bE"], ["-u", "-S"], ["-W", "ignore", "-XutF8", "-sI"]):
            with self.subTest(options):
                bare = self.run_("python", *options, "program.py")
                out, said, status = self.run_("concertina", "run", "python", *options, "program.py")
                self.assertEqual((out, status), (bare[0], bare[2]))
                self.assertRegex(said, r"\Aconcertina: [^\n]*started with -[IES], [^\n]*\n\Z")
        for arguments in (["-W", "I", "program.py"], ["program.py", "-I"], ["-c", "print(1)", "-E"]):
            with self.subTest(arguments):
                self.same_run(*arguments)

    def test_nothing_is_done_where_it_is_disabled(self):
        self.write("plain.py", "print('started')")
        wrong = {"CONCERTINA_DISABLE": "1", "CONCERTINA_LIBRARY": "/nothing.so"}
        self.assertEqual(self.run_("python", "-m", "concertina", "plain.py", **wrong)[2], 0)
        code = "import sys; print('concertina' in sys.modules)"
        for disabled, found in ("1", "False"), ("0", "True"):
            ours = self.run_("concertina", "run", "python", "-c", code, CONCERTINA_DISABLE=disabled)
            self.assertEqual(ours, (f"{found}\n", "", 0))

    def test_nothing_is_done_in_a_python_that_is_too_old(self):
        code = "import site, sys; sys.version_info = {}; site.main(); print('concertina' in sys.modules)"
        startup = {"PYTHONPATH": str(self.packages / "concertina/startup")}
        for version, found in ((2, 7), "False"), ((3, 7, 1), "False"), ((3, 8, 0), "True"):
            ours = self.run_("python", "-S", "-c", code.format(version), **startup)
            self.assertEqual(ours, (f"{found}\n", "", 0))

    def test_what_is_set_wrong(self):
        """It is said in one line, and the program does not start."""
        self.write("started.py", "print('started')")
        text = self.work / self.write("text.so", "no library")
        for variable, value in (
            ("CONCERTINA_CONF", "limit:8Q"),
            ("CONCERTINA_CONF", "limt:8G"),
            ("CONCERTINA_CONF", "free:lazy"),
            ("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:1.1"),
            ("CONCERTINA_STATS", "/no/such/directory/stats.json"),
            ("CONCERTINA_LIBRARY", "/nothing.so"),
            ("CONCERTINA_LIBRARY", str(text)),
        ):
            with self.subTest(variable, value=value):
                wrong = {variable: value}
                for command in ["python", "-m", "concertina"], ["concertina", "run", "python"]:
                    out, said, status = self.run_(*command, "started.py", **wrong)
                    self.assertEqual((out, status), ("", 2), said)
                    self.assertRegex(said, r"\Aconcertina: [^\n]*\n\Z")
                    self.assertIn(value.partition(":")[0], said)
        out, said, status = self.run_("python", "-m", "concertina", "started.py", PYTORCH_ALLOC_CONF="x:1")
        self.assertEqual((out, status), ("started\n", 0))

    def test_what_names_no_program(self):
        for arguments in ([], ["--nonsense"], ["nothing.py"], ["-m"]):
            with self.subTest(arguments):
                out, said, status = self.run_("python", "-m", "concertina", *arguments)
                self.assertEqual((out, status), ("", 2))
                self.assertRegex(said, r"\Aconcertina: .*\n\Z")


class WithTorch(Installed):
    """The real torch, on the simulated GPU or on a real one."""

    PROGRAM = """\
import importlib.util
importlib.util.find_spec("torch")
import torch.nn
if torch.cuda.is_available():
    tensor = torch.ones(1 << 20, device="cuda")
    print(tensor.numel(), torch.cuda.memory_allocated())
else:
    print(torch.ones(3).sum(), torch.cuda.memory_allocated())
"""

    @classmethod
    def setUpClass(cls):
        if GPU:
            packages = pathlib.Path(importlib.util.find_spec("torch").origin).parent.parent
            libraries = os.environ.get("LD_LIBRARY_PATH", "")
            paths = {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": libraries}
            cls.environment = cls.environment | paths
            return
        torch = pathlib.Path(built("scripts/torch-env.sh")).parent.parent
        [packages] = torch.glob("lib/python3*/site-packages")
        cls.environment = cls.environment | {
            "PYTHONPATH": str(packages),
            "LD_LIBRARY_PATH": built("scripts/standin.sh"),
            "STANDIN_VIOLATIONS": str(cls.work / "violations"),
        }

    def tearDown(self):
        self.assertFalse((self.work / "violations").exists())

    def test_its_memory_is_from_concertina(self):
        self.write("train.py", self.PROGRAM)
        stats = self.work / "stats.json"
        bare = self.run_("python", "train.py", CONCERTINA_STATS=str(stats))
        self.assertFalse(stats.exists())
        for program in (["train.py"], ["-m", "train"]):
            with self.subTest(program):
                ours = self.run_("python", "-m", "concertina", *program, CONCERTINA_STATS=str(stats))
                self.assertEqual(ours, bare)
                self.assertEqual(ours[1:], ("", 0))
                [device] = json.loads(stats.read_text())["devices"]
                self.assertEqual(device["memory_stats"]["allocated_bytes.all.peak"], 4 << 20)
                stats.unlink()

    def started(self, *command, **environment):
        """What the command says under `concertina run`, and of each process that used memory how many
        bytes of it at most, in order."""
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            stats = f"{scratch}/%p.json"
            out, said, status = self.run_(
                "concertina", "run", "--stats", stats, "--", *command, **environment
            )
            self.assertEqual(status, 0, said)
            peaks = []
            for file in pathlib.Path(scratch).iterdir():
                process = json.loads(file.read_text())
                if not process["used_gpu"]:
                    continue
                [device] = process["devices"]
                peaks.append(device["memory_stats"]["allocated_bytes.all.peak"])
        return out, said, sorted(peaks)

    def test_what_run_starts(self):
        self.write("train.py", self.PROGRAM)
        bare = self.run_("python", "train.py")
        self.assertEqual(bare[0], "1048576 4194304\n")
        again = "import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)"
        environment = dict(PYTORCH_CUDA_ALLOC_CONF="roundup_power2_divisions:4", CONCERTINA_CONF="")
        for command, times in (
            (["python", "train.py"], 1),
            (["python", "-m", "train"], 1),
            (["python", "-m", "concertina", "train.py"], 1),
            (["python", "-c", again], 1),
            (["python", self.write("both.py", f"import train\n{again}")], 2),
            (["python", "-Wignore", self.write("spawns.py", SPAWNS)], 2),
            (["python", "-Wignore", self.write("loads.py", LOADS)], 1),
            (["python", "-m", "torch.distributed.run", "--nproc-per-node", "2",
              self.write("ranks.py", RANKS)], 2),
        ):
            with self.subTest(command):
                out, said, peaks = self.started(*command, **environment)
                self.assertEqual(out, bare[0] * times)
                self.assertEqual(peaks, [4 << 20] * times)
                self.assertNotIn("concertina", said)

    def test_programs_that_set_an_allocator(self):
        """Ours is no other one, and another one does not take its place."""
        for allocate, line in (
            ("concertina_malloc", ""),
            ("concertina_base_alloc", "PyTorch keeps concertina, and not .*"),
        ):
            with self.subTest(allocate):
                self.write("sets.py", f"allocate = {allocate!r}\n{SETS}{self.PROGRAM}")
                out, said, peaks = self.started("python", "sets.py")
                self.assertEqual((out, peaks), ("1048576 4194304\n", [4 << 20]))
                self.assertRegex(said, rf"\A(concertina: {line}\n)?\Z")
                self.assertEqual(bool(said), bool(line))

    def test_other_libraries_in_the_same_process(self):
        out, said, peaks = self.started("python", self.write("other.py", OTHER))
        # What another library has is not among PyTorch's figures.
        self.assertEqual((out, said, peaks), ("4194304 4194304 4194304\n", "", [4 << 20]))

    def test_python_that_ignores_its_environment(self):
        packages = self.environment["PYTHONPATH"]
        self.write("alone.py", f"import sys; sys.path.append({packages!r})\n{self.PROGRAM}")
        self.write("starts.py", "import subprocess, sys\n"
                                "subprocess.run([sys.executable, '-I', 'alone.py'], check=True)")
        for command, how in (
            (["-I", "alone.py"], "-I"),
            (["-E", "alone.py"], "-E"),
            (["starts.py"], "-I, -E or -S or another PYTHONPATH"),
        ):
            with self.subTest(command):
                out, said, peaks = self.started("python", *command)
                self.assertEqual(out, "1048576 4194304\n")
                self.assertRegex(
                    said, rf"\Aconcertina: PyTorch keeps [^\n]* started with {how}, [^\n]*\n\Z"
                )
                # PyTorch's own allocator takes its segments from the library.
                self.assertEqual(peaks, [20 << 20])

    def test_a_limit(self):
        """Under concertina, and under PyTorch's own allocator on top of it."""
        packages = self.environment["PYTHONPATH"]
        self.write("limited.py", f"import sys; sys.path.append({packages!r})\n{LIMITED}")
        for options in [], ["-I"]:
            with self.subTest(options):
                out, said, status = self.run_(
                    "concertina", "run", "--limit", "64", "--", "python", *options, "limited.py"
                )
                self.assertEqual((out, status), ("64 of 64\nCUDA out of memory.\n24 of 64\n", 0))

    def test_a_gpu_that_is_in_use_already(self):
        code = "import sys, torch\ntorch.ones(1, device='cuda')\nfrom concertina import hook"
        late = self.write("late.py", f"{code}\nhook.watch()\nprint(torch.ones(3).sum())")
        out, said, status = self.run_("python", late)
        self.assertEqual((out, status), ("tensor(3.)\n", 0))
        self.assertRegex(said, r"\Aconcertina: PyTorch keeps its own [^\n]* CUDA is initialised .*\n\Z")

    def test_without_a_gpu(self):
        self.environment = self.environment | {"STANDIN_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}
        out, said, status = self.same(self.write("train.py", self.PROGRAM))
        self.assertEqual((out, said, status), ("tensor(3.) 0\n", "", 0))

    def test_where_it_cannot_be_installed(self):
        """What `install` raises."""
        code = ("import concertina, sys\ntry: concertina.install()\n"
                "except ValueError as error: print(error, concertina.is_active())")
        self.write("install.py", code)
        for variable, value in (
            ("CONCERTINA_CONF", "limit:8Q"),
            ("CONCERTINA_CONF", "free:lazy"),
            ("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:1.1"),
            ("CONCERTINA_STATS", "/no/such/directory/stats.json"),
            ("CONCERTINA_LIBRARY", "/nothing.so"),
        ):
            with self.subTest(variable, value=value):
                out, said, status = self.run_("python", "install.py", **{variable: value})
                self.assertEqual(status, 0, said)
                self.assertIn(value, out)
                self.assertTrue(out.endswith(" False\n"), out)
                self.assertEqual(said.count("concertina: "), variable != "CONCERTINA_LIBRARY", said)

    def test_a_limit_that_a_program_sets_wrong(self):
        """Its children do not start with none."""
        again = ("import os, subprocess, sys; os.environ['CONCERTINA_CONF'] = 'limit:8Q'\n"
                 "sys.exit(subprocess.run([sys.executable, 'train.py']).returncode)")
        self.write("train.py", self.PROGRAM)
        out, said, status = self.run_("concertina", "run", "python", "-c", again)
        self.assertEqual((out, status), ("", 2))
        self.assertRegex(said, r"\Aconcertina: CONCERTINA_CONF: limit:8Q [^\n]*\n\Z")
        # Without statistics they do.
        gone = again.replace("CONF", "STATS").replace("limit:8Q", "/no/such/directory/stats.json")
        out, said, status = self.run_("concertina", "run", "python", "-c", gone)
        self.assertEqual((out, status), ("1048576 4194304\n", 0))
        self.assertRegex(said, r"\Aconcertina: CONCERTINA_STATS: [^\n]* cannot be written [^\n]*\n\Z")
        # And neither does a process of its own that imports torch after that.
        code = "import os; os.environ['CONCERTINA_CONF'] = 'limit:8Q'; import train"
        out, said, status = self.run_("concertina", "run", "python", "-c", code)
        self.assertEqual((out, status), ("", 2))
        self.assertRegex(said, r"\Aconcertina: CONCERTINA_CONF: limit:8Q [^\n]*\n\Z")


setUpModule = Installed.setUpModule


def built(*command, **environment):
    """What a script of this project prints."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def library():
    if GPU:
        release = ROOT / "target/release/libconcertina.so"
        return pathlib.Path(os.environ.get("CONCERTINA_LIBRARY", release)).resolve()
    built("cargo", "build", "--locked", "--quiet", "--lib", "--bins")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return (ROOT / target / "debug/libconcertina.so").resolve()


if __name__ == "__main__":
    unittest.main(argv=[argument for argument in sys.argv if argument != "--gpu"])
