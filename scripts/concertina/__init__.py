"""Switches PyTorch to the concertina allocator with one line.

    import concertina; concertina.install()

Call it before anything uses the GPU. ``concertina.is_active()`` says whether it is PyTorch's allocator,
``concertina.stats()`` where the memory is.
"""

# Nothing that takes time to import: under `concertina run` every Python imports this.
import os
import sys

__all__ = ["install", "is_active", "stats", "dump_stats", "library", "get_include"]
__version__ = "0.1.0"

_HERE = os.path.dirname(os.path.realpath(__file__))
_library = None
_installed = False


class Misconfigured(ValueError):
    """The environment has a mistake in it, which the library has named on standard error."""


def is_disabled():
    """Whether ``CONCERTINA_DISABLE=1`` leaves this process as it is without concertina."""
    return os.environ.get("CONCERTINA_DISABLE") == "1"


def library():
    """The path of ``libconcertina.so``: what ``CONCERTINA_LIBRARY`` names, else the one beside
    this module, else the one that ``cargo build --release`` made in this source tree."""
    named = os.environ.get("CONCERTINA_LIBRARY")
    if named:
        return named
    name = "libconcertina.so"
    beside = os.path.join(_HERE, name)
    built = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "target", "release", name)
    for path in (beside, built):
        if os.path.exists(path):
            return path
    raise FileNotFoundError(
        f"libconcertina.so is neither at {beside} nor at {built}: "
        "build it with `cargo build --release`, or name it in CONCERTINA_LIBRARY"
    )


def get_include():
    """The directory of ``concertina.h``, for ``-I`` of a C compiler: the one in this module, else the one in
    this source tree."""
    installed = os.path.join(_HERE, "include")
    source = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "include")
    for path in (installed, source):
        if os.path.exists(os.path.join(path, "concertina.h")):
            return path
    raise FileNotFoundError(f"concertina.h is neither in {installed} nor in {source}")


def _load():
    global _library
    if _library is None:
        import ctypes

        path = library()
        try:
            loaded = ctypes.CDLL(path)
            loaded.concertina_stats_json.restype = ctypes.c_size_t
            loaded.concertina_stats_json.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
            loaded.concertina_dump_stats.argtypes = [ctypes.c_char_p]
        except (OSError, AttributeError) as error:
            raise ValueError(f"{path} is not concertina's library: {error}") from error
        _library = loaded
    return _library


def check(limits_only=False):
    """Raises ValueError where the environment has a mistake in it, or only one that lifts a limit, or
    names no library."""
    # The library fits PyTorch as it is loaded. Where it was loaded before, it has to look again.
    _load().concertina_attach()
    fitted = sys.modules.get("_concertina")
    mistakes = fitted.mistakes() if fitted else []
    lines = [line for line, lifts_limit in mistakes if lifts_limit or not limits_only]
    if lines:
        raise Misconfigured("; ".join(lines))


def install(_limits_only=False):
    """Makes concertina PyTorch's allocator for CUDA memory.

    Works once a process and only before CUDA is initialised; RuntimeError otherwise. ValueError
    where the settings or the path of the statistics have a mistake in them, or the library is
    none. A second call does nothing, and neither does any with ``CONCERTINA_DISABLE=1``.
    """
    global _installed
    if _installed or is_disabled():
        return
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "concertina.install() comes too late: CUDA is initialised already; "
            "call it before anything uses the GPU"
        )
    check(_limits_only)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library(), "concertina_malloc", "concertina_free"
    )
    torch.cuda.memory.change_current_allocator(allocator)
    _installed = True


def is_active():
    """Whether concertina is PyTorch's allocator for CUDA memory in this process, however it came to
    be. Where it is, ``torch.cuda.get_allocator_backend()`` says ``pluggable``."""
    fitted = sys.modules.get("_concertina")
    return fitted is not None and fitted.is_active()


def stats():
    """The statistics as a dict: what ``CONCERTINA_STATS`` writes at exit, as it is now."""
    import ctypes
    import json

    lib = _load()
    length = lib.concertina_stats_json(None, 0)
    while True:
        # Other threads allocate meanwhile: the text may have grown.
        buffer = ctypes.create_string_buffer(length + 256)
        length = lib.concertina_stats_json(buffer, len(buffer))
        if length < len(buffer):
            return json.loads(buffer.value)


def dump_stats(path=None):
    """Writes the statistics to ``path`` (``%p``, ``%h`` and ``%r`` stand for pid, host and rank),
    or to what ``CONCERTINA_STATS`` names. Raises OSError if that fails."""
    error = _load().concertina_dump_stats(None if path is None else os.fsencode(path))
    if error:
        raise OSError(error, os.strerror(error), path)
