#!/usr/bin/env python3
"""Makes a wheel, installs it as a user would, and tries what it brings: the command, the module, and
`python -m concertina`, without torch and with the real one on the simulated GPU.

    tests/wheel.py

The library and the command are those that cargo builds for tests. Nothing but the new environment's
own programs is on the PATH of what is tried, so no compiler either.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Says all that a program can see of how it was started.
SEEN = """\
import atexit, pickle, sys
class Thing: pass
def late(): print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.modules["__main__"].__name__)
atexit.register(late)
names = {name: str(value) for name, value in globals().items() if not callable(value)}
print(__file__, __name__, sys.argv, sys.path[0], sorted(names), __package__, type(__loader__))
try:
    import torch
except ImportError as error:
    print(error)
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
        wheel = built("scripts/wheel.sh", str(cls.work), CONCERTINA_LIBRARY=str(library()))
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

    def same(self, *arguments):
        """Under concertina the program does what it does bare; what that is."""
        bare = self.run_("python", *arguments)
        self.assertEqual(self.run_("python", "-m", "concertina", *arguments), bare)
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

    def test_what_names_no_program(self):
        for arguments in ([], ["--nonsense"], ["nothing.py"], ["-m"]):
            with self.subTest(arguments):
                out, said, status = self.run_("python", "-m", "concertina", *arguments)
                self.assertEqual((out, status), ("", 2))
                self.assertRegex(said, r"\Aconcertina: .*\n\Z")


class WithTorch(Installed):
    """The real torch, on the simulated GPU."""

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

    def test_without_a_gpu(self):
        self.environment = self.environment | {"STANDIN_DEVICES": "0"}
        out, said, status = self.same(self.write("train.py", self.PROGRAM))
        self.assertEqual((out, said, status), ("tensor(3.) 0\n", "", 0))

    def test_where_it_cannot_be_installed(self):
        self.write("train.py", self.PROGRAM)
        bare = self.run_("python", "train.py")
        ours = self.run_("python", "-m", "concertina", "train.py", CONCERTINA_LIBRARY="/nothing.so")
        self.assertEqual((ours[0], ours[2]), (bare[0], bare[2]))
        self.assertRegex(ours[1], r"\Aconcertina: .*/nothing.so.*\n\Z")


setUpModule = Installed.setUpModule


def built(*command, **environment):
    """What a script of this project prints."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def library():
    built("cargo", "build", "--locked", "--quiet", "--lib", "--bins")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return (ROOT / target / "debug/libconcertina.so").resolve()


if __name__ == "__main__":
    unittest.main()
