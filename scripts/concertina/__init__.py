"""Switches PyTorch to the concertina allocator with one line.

    import concertina; concertina.install()

Call it before anything uses the GPU. ``concertina.stats()`` then says where the memory is.
"""

# Nothing that takes time to import: under `concertina run` every Python imports this.
import os

__all__ = ["install", "stats", "dump_stats", "library"]

_HERE = os.path.dirname(os.path.realpath(__file__))
_library = None
_installed = False


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


def _load():
    global _library
    if _library is None:
        import ctypes

        _library = ctypes.CDLL(library())
        _library.concertina_stats_json.restype = ctypes.c_size_t
        _library.concertina_stats_json.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        _library.concertina_dump_stats.argtypes = [ctypes.c_char_p]
    return _library


def install():
    """Makes concertina PyTorch's allocator for CUDA memory.

    Works once a process and only before CUDA is initialised; RuntimeError otherwise. A second
    call does nothing.
    """
    global _installed
    if _installed:
        return
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "concertina.install() comes too late: CUDA is initialised already; "
            "call it before anything uses the GPU"
        )
    # The library fits PyTorch as it is loaded. Where it was loaded before, it has to look again.
    _load().concertina_attach()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library(), "concertina_malloc", "concertina_free"
    )
    torch.cuda.memory.change_current_allocator(allocator)
    _installed = True


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
