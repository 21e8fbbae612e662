"""Runs a Python program as ``python`` itself does, with concertina as PyTorch's allocator."""

import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import sys

import concertina
from concertina import hook

USAGE = """\
Runs a Python program with concertina as PyTorch's allocator for CUDA memory.

  python -m concertina SCRIPT [argument]…
  python -m concertina -m MODULE [argument]…

Programs that it starts are not under concertina: `concertina run` takes those along.
"""


def run(arguments):
    """Runs the program that ``arguments`` name. What it ends with (SystemExit, any exception)
    comes out of here, and the traceback that is shown begins in the program."""
    match arguments:
        case ["-h" | "--help"]:
            print(USAGE, end="")
            return
        case ["-m", name, *rest]:
            sys.argv[:] = ["-m", *rest]
            start, argument = _module, name
        case [path, *_] if not path.startswith("-"):
            sys.argv[:] = arguments
            start, argument = _script, path
        case _:
            given = f"'{arguments[0]}' names no program" if arguments else "no program is given"
            _give_up(f"{given}; allowed is SCRIPT, -m MODULE or --help")
    if not concertina.is_disabled():
        try:
            concertina.check()
        except concertina.Misconfigured:
            raise SystemExit(2) from None
        except (ValueError, FileNotFoundError) as error:
            _give_up(error)
    hook.watch()
    try:
        start(argument)
    except BaseException as error:
        _show_shortened(error.__traceback__)
        raise


def _module(name, alter_argv=True):
    _new_main()
    # What `python -m` itself calls. `runpy.run_module` puts another module in the place of
    # `__main__`, and takes it away while threads and exit functions still need it.
    runpy._run_module_as_main(name, alter_argv)


def _script(path):
    # That of `python -m concertina` is the current directory.
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if not safe:
        del sys.path[0]
    # A directory or an archive with a `__main__.py`.
    if pkgutil.get_importer(path) is not None:
        sys.path.insert(0, os.path.abspath(path))
        return _module("__main__", alter_argv=False)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        _give_up(f"can't open {path}: {error.strerror}")
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    names = _new_main()
    names["__file__"] = path
    names["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), names)


def _new_main():
    """The names of `__main__`, as a program finds them at its start."""
    names = sys.modules["__main__"].__dict__
    # Which ones there are depends on the version of Python.
    new = {name: None for name in names if name.startswith("__")}
    new |= {"__name__": "__main__", "__builtins__": builtins}
    if "__annotations__" in new:
        new["__annotations__"] = {}
    names.clear()
    names.update(new)
    return names


def _show_shortened(traceback):
    """Has an exception shown without this file's part of its ``traceback``."""
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    show = sys.excepthook

    def shorten(kind, error, _):
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = shorten


def _give_up(why):
    print(f"concertina: {why}", file=sys.stderr)
    raise SystemExit(2)
