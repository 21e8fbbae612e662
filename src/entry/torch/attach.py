"""Run inside a Python process that has the library loaded: fits PyTorch's functions to it.

`functions` is put here by whoever runs this: addresses of the library's functions, by name.
"""

import ctypes
import functools
import json
import sys
import types

# PyTorch's hooks by their setters, and the functions for them.
HOOKS = {
    "set_init_fn": "init",
    "set_reset_fn": "empty_cache",
    "set_memory_fraction_fn": "memory_fraction",
    "set_base_alloc_fn": "base_alloc",
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "end_allocate_to_pool",
    "set_release_pool": "release_pool",
}

ours = []


def native(name, result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)(functions[name])


attach_object = native("attach", ctypes.c_bool, ctypes.c_bool)
memory_stats = native(
    "memory_stats", ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
)
reset_peaks = native("reset_peaks", None, ctypes.c_int)
reset_accumulated = native("reset_accumulated", None, ctypes.c_int)
fraction = native("fraction", ctypes.c_double, ctypes.c_int)


def read(function, *arguments):
    """What a function says in JSON; the text may grow between two calls."""
    length = function(*arguments, None, 0)
    while True:
        buffer = ctypes.create_string_buffer(length + 1024)
        length = function(*arguments, buffer, len(buffer))
        if length < len(buffer):
            return json.loads(buffer.value)


def attach():
    """Watches for an allocator of ours, from now on; does nothing without PyTorch."""
    core = getattr(sys.modules.get("torch"), "_C", None)
    make = getattr(core, "_cuda_customAllocator", None)
    change = getattr(core, "_cuda_changeCurrentAllocator", None)
    if make is None or change is None:
        native("later", None)()
        return
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def _cuda_customAllocator(allocate, free):
        if allocate != functions["concertina_malloc"]:
            return make(allocate, free)
        allocator = make(functions["allocate"], free)
        hook(allocator)
        ours.append(allocator)
        return allocator

    @functools.wraps(change)
    def _cuda_changeCurrentAllocator(allocator):
        change(allocator)
        if any(allocator is it for it in ours):
            attach_object(True)
            replace_functions(core)

    core._cuda_customAllocator = _cuda_customAllocator
    core._cuda_changeCurrentAllocator = _cuda_changeCurrentAllocator
    if attach_object(False):
        # It was changed before anybody watched.
        hook(core._cuda_getAllocator())
        replace_functions(core)


def hook(allocator):
    for setter, name in HOOKS.items():
        set_hook = getattr(allocator, setter, None)
        if set_hook is not None:
            set_hook(functions[name])


def replace_functions(core):
    """Puts ours in place of the functions that raise under any pluggable allocator."""

    def device_number(device):
        if not isinstance(device, int) or not 0 <= device < core._cuda_getDeviceCount():
            raise RuntimeError(f"Invalid device argument: {device}")
        return device

    def nested_stats(device):
        stats = {}
        for name, value in read(memory_stats, device_number(device)).items():
            *path, last = name.split(".")
            place = stats
            for step in path:
                place = place.setdefault(step, {})
            place[last] = value
        return stats

    def reset(function):
        return lambda device: function(device_number(device))

    for name, function in {
        "_cuda_memoryStats": nested_stats,
        "_cuda_resetPeakMemoryStats": reset(reset_peaks),
        "_cuda_resetAccumulatedMemoryStats": reset(reset_accumulated),
        "_cuda_getMemoryFraction": lambda device: fraction(device_number(device)),
        "_accelerator_getDeviceStats": nested_stats,
        "_accelerator_resetPeakStats": reset(reset_peaks),
        "_accelerator_resetAccumulatedStats": reset(reset_accumulated),
    }.items():
        if hasattr(core, name):
            setattr(core, name, function)


module = types.ModuleType("_concertina")
module.attach = attach
sys.modules["_concertina"] = module
attach()
