"""Makes PyTorch's Python functions of memory show this library's allocator. The library runs it in the Python
process that has loaded it.

`functions`, which the library sets, holds addresses of its functions by name.
"""

import ctypes
import functools
import itertools
import json
import os
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

# Which tracebacks are kept, as the library counts it.
CONTEXTS = {None: 0, "state": 1, "alloc": 2, "all": 3}
END = -1
MAX_ENTRIES = 2**63

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
OBSERVE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)

ours = []
observers = []


def native(name, result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)(functions[name])


attach_object = native("attach", ctypes.c_bool, ctypes.c_bool)
is_disabled = native("is_disabled", ctypes.c_bool)
mistakes = native("mistakes", None, CALLBACK)
memory_stats = native("memory_stats", None, ctypes.c_int, CALLBACK)
private_pool_bytes = native("private_pool_bytes", None, ctypes.c_int, CALLBACK)
reset_peaks = native("reset_peaks", None, ctypes.c_int)
reset_accumulated = native("reset_accumulated", None, ctypes.c_int)
fraction = native("fraction", ctypes.c_double, ctypes.c_int)
change_settings = native("change_settings", None, ctypes.c_char_p, ctypes.c_size_t)
record = native(
    "record", None, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_bool, ctypes.c_size_t
)
actions = native("actions", None, CALLBACK)
is_recorded = native("is_recorded", ctypes.c_bool)
keep_tracebacks = native("keep_tracebacks", None, ctypes.c_bool)
snapshot = native(
    "snapshot", None, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_bool, CALLBACK
)
set_called_by_script = native("set_called_by_script", None, ctypes.c_bool)
set_test_pattern = native("set_test_pattern", None, ctypes.c_bool)
restore_class_functions = native("restore_class_functions", None)
set_metadata = native("set_metadata", None, ctypes.c_char_p, ctypes.c_size_t)
set_profiling = native("set_profiling", None, ctypes.c_bool)
start_gpu_trace = native("start_gpu_trace", None, ctypes.c_size_t)
is_gpu_traced = native("is_gpu_traced", ctypes.c_bool)
set_observer = native("set_observer", None, OBSERVE)
POOL = ctypes.c_int, ctypes.c_ulonglong, ctypes.c_ulonglong
pool_blocks = native("pool_blocks", None, *POOL, CALLBACK)
restore = native("restore", ctypes.c_ulonglong, *POOL, ctypes.c_void_p, ctypes.c_size_t)
end_allocate_to_pool = native("end_allocate_to_pool", None, *POOL)
swap_owner = native("swap_owner", ctypes.c_bool, *[ctypes.c_size_t] * 3)


def read(function, *arguments):
    """The value that a function sends as JSON."""
    texts = []
    function(*arguments, CALLBACK(lambda text, size: texts.append(ctypes.string_at(text, size))))
    return json.loads(texts[0])


class PoolState:
    """A checkpoint of a private pool: its live blocks. A block is its address, size, requested bytes,
    and its stream's handle and id."""

    def __init__(self, pool, blocks):
        self.pool, self.blocks = pool, blocks


def immortal(thing):
    """Keeps an object alive for good: the library has its address."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def attach():
    """From now on, attaches to each allocator that is made of this library's functions. Without PyTorch
    it is to run again."""
    core = getattr(sys.modules.get("torch"), "_C", None)
    make = getattr(core, "_cuda_customAllocator", None)
    change = getattr(core, "_cuda_changeCurrentAllocator", None)
    if make is None or change is None:
        native("run_again", None)()
        return
    if any(make is it for it in ours):
        return

    @functools.wraps(make)
    def _cuda_customAllocator(allocate, free):
        if (allocate, free) != (functions["concertina_malloc"], functions["concertina_free"]):
            return make(allocate, free)
        if is_disabled():
            allocator = make(allocate, free)
        else:
            # The program must not run without its limit.
            for line, lifts_limit in read(mistakes):
                if lifts_limit:
                    raise ValueError(line)
            allocator = make(functions["allocate"], functions["release"])
            hook(allocator)
        ours.append(allocator)
        return allocator

    @functools.wraps(change)
    def _cuda_changeCurrentAllocator(allocator):
        is_ours = any(allocator is it for it in ours)
        if is_ours and is_disabled():
            return
        # The program may set the allocator that it has.
        if (is_ours or module.stays) and attach_object(False):
            if not is_ours:
                complain("PyTorch keeps concertina, and not the allocator that the program sets")
            return
        change(allocator)
        if is_ours:
            attach_object(True)
            replace_functions(core)

    core._cuda_customAllocator = _cuda_customAllocator
    core._cuda_changeCurrentAllocator = _cuda_changeCurrentAllocator
    ours.append(_cuda_customAllocator)
    if attach_object(False):
        # It was changed before this ran.
        hook(core._cuda_getAllocator())
        replace_functions(core)


def hook(allocator):
    for setter, name in HOOKS.items():
        set_hook = getattr(allocator, setter, None)
        if set_hook is not None:
            set_hook(functions[name])


def watch_profilers(core):
    """Has the library ask PyTorch for each block whether memory is profiled only once a profiler was
    started; always where profilers may start unseen."""
    modules = getattr(core, "_autograd", None), *(
        sys.modules.get(name) for name in ("torch.autograd", "torch.autograd.profiler")
    )
    names = "_enable_profiler", "_enable_profiler_legacy"
    known = getattr(modules[0], names[0], None)
    if known is None or any(getattr(it, names[0], None) is not known for it in modules):
        return
    is_profiled = getattr(modules[0], "_profiler_enabled", lambda: True)
    if is_profiled() or "KINETO_USE_DAEMON" in os.environ:
        return

    def announcing(start):
        @functools.wraps(start)
        def announce(*arguments):
            set_profiling(True)
            return start(*arguments)

        return announce

    for name in names:
        start = getattr(modules[0], name, None)
        announce = start and announcing(start)
        for module in *modules, sys.modules.get("torch.autograd.profiler_legacy"):
            if start is not None and getattr(module, name, None) is start:
                setattr(module, name, announce)
    set_profiling(False)


def watch_gpu_trace(core):
    """Has the library call PyTorch's GPU trace for blocks once it is activated, as PyTorch's own
    allocator does."""
    activate = getattr(core, "_activate_gpu_trace", None)
    if activate is None:
        return

    def fire(address, frees):
        from torch.cuda import _gpu_trace

        callbacks = (
            _gpu_trace.MemoryDeallocationCallbacks if frees else _gpu_trace.MemoryAllocationCallbacks
        )
        callbacks.fire_callbacks(address)

    immortal(fire)

    @functools.wraps(activate)
    def _activate_gpu_trace():
        activate()
        start_gpu_trace(id(fire))

    core._activate_gpu_trace = _activate_gpu_trace
    if is_gpu_traced():
        start_gpu_trace(id(fire))


def test_pattern(has_rejections):
    """The statistics that PyTorch has to read from the test pattern: each figure is a number, from 1000
    on."""
    numbers = itertools.count(1000)

    def figure():
        return {flow: next(numbers) for flow in ("current", "peak", "allocated", "freed")}

    stats = {
        name: {pool: figure() for pool in ("all", "small_pool", "large_pool")}
        for name in (
            "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
            "active_bytes", "inactive_split_bytes", "requested_bytes",
        )
    }
    stats |= {name: next(numbers) for name in ("num_alloc_retries", "num_ooms")}
    stats |= {name: figure() for name in ("oversize_allocations", "oversize_segments")}
    rejections = ("num_oom_rejections",) if has_rejections else ()
    names = "num_sync_all_streams", "num_device_alloc", "num_device_free", *rejections
    return stats | {name: next(numbers) for name in (*names, "max_split_size")}


def check_classes(core):
    """Has PyTorch read statistics that the library has written as an object of PyTorch's class. Where it
    reads other numbers, its classes differ from those of its release, and the functions with such
    classes stay PyTorch's."""
    set_test_pattern(True)
    try:
        theirs = core._cuda_memoryStats(0)
    except (AttributeError, RuntimeError):
        # The function was not replaced.
        return
    finally:
        set_test_pattern(False)
    theirs.pop("reserved_bytes_by_private_pools", None)
    if theirs != test_pattern("num_oom_rejections" in theirs):
        restore_class_functions()


def replace_functions(core):
    """Replaces the functions that raise under any pluggable allocator."""

    check_classes(core)
    watch_profilers(core)
    watch_gpu_trace(core)

    def device_number(device):
        if not isinstance(device, int) or not 0 <= device < core._cuda_getDeviceCount():
            raise RuntimeError(f"Invalid device argument: {device}")
        return device

    words = str(getattr(sys.modules["torch"], "__version__", "")).split(".")
    release = tuple(int(word) if word.isdigit() else 0 for word in words[:2])

    def flow(numbers):
        return dict(zip(("current", "peak", "allocated", "freed"), numbers))

    def nested_stats_of_all(device):
        stats = nested_stats(device)
        if release >= (2, 12):
            # Nothing is refused ahead of time.
            stats["num_oom_rejections"] = 0
        if release >= (2, 13):
            stats["reserved_bytes_by_private_pools"] = {
                # Every segment is a large one.
                tuple(pool): {"all": flow(bytes), "small_pool": flow([0] * 4), "large_pool": flow(bytes)}
                for pool, bytes in read(private_pool_bytes, device)
            }
        return stats

    def nested_stats(device):
        stats = {}
        for name, value in read(memory_stats, device).items():
            *path, last = name.split(".")
            place = stats
            for step in path:
                place = place.setdefault(step, {})
            place[last] = value
        return stats

    # Each is a Python function of its own: torch.compile tells them apart by identity and hash.
    def of_device(function):
        return lambda device: function(device_number(device))

    def start_or_stop(enabled, contexts, entries, cpp, clear, skip):
        if not enabled:
            record(END, 0, 0, clear, 0)
            return
        names = read(actions)
        bits = sum(1 << names.index(name) for name in set(skip) & set(names))
        gather = functools.partial(core._profiler.gather_traceback, True, True, cpp)
        record(contexts, min(entries, MAX_ENTRIES), bits, clear, id(immortal(gather)))

    def is_wanted(record_pinned_host_memory=False, record_cuda=True, *_):
        """Whether memory of the GPU is to be recorded: from 2.14 on, that of the host may be alone."""
        return record_cuda

    def call_theirs(function, *arguments):
        """Calls a function of PyTorch's for its own part: what reaches the allocator object meanwhile
        has no effect."""
        set_called_by_script(True)
        try:
            return function(*arguments)
        finally:
            set_called_by_script(False)

    def start_theirs(start, *arguments):
        """Has PyTorch pass annotations and compiled regions on, where the allocator object takes them."""
        # Without the actions to skip, of which releases before 2.11 know nothing.
        for given in arguments, arguments[:-1]:
            try:
                return call_theirs(start, *given)
            except TypeError:
                pass
            except RuntimeError as error:
                # The function of the object was not replaced. The caller gets any other error.
                if "CUDAPluggableAllocator" not in str(error):
                    raise
                return

    their_snapshot = core._cuda_memorySnapshot
    their_record_history = core._cuda_record_memory_history
    their_record_history_legacy = getattr(core, "_cuda_record_memory_history_legacy", None)

    def record_history(
        enabled,
        context,
        stacks,
        entries,
        clear=False,
        compiling=False,
        annotations=False,
        skip=(),
        *host,
    ):
        for value, allowed in (
            (enabled, (None, "state", "all")),
            (context, tuple(CONTEXTS)),
            (stacks, ("python", "all")),
        ):
            if value not in allowed:
                raise RuntimeError(f"expected one of {allowed}, not {value!r}")
        # What it records itself is memory of the host.
        start_theirs(
            their_record_history,
            enabled, context, stacks, entries, clear, compiling, annotations, list(skip), *host,
        )
        kept = entries if enabled == "all" else 1
        start_or_stop(
            enabled if is_wanted(*host) else None,
            CONTEXTS[context], kept, stacks == "all", clear, skip,
        )

    def record_history_legacy(
        enabled,
        context=True,
        entries=1,
        entries_context=False,
        cpp=False,
        clear=False,
        compiling=False,
        annotations=False,
        skip=(),
        *host,
    ):
        start_theirs(
            their_record_history_legacy,
            enabled, context, entries, entries_context, cpp, clear, compiling, annotations,
            list(skip), *host,
        )
        contexts = "alloc" if entries_context else "state" if context else None
        start_or_stop(
            enabled if is_wanted(*host) else None, CONTEXTS[contexts], entries, cpp, clear, skip
        )

    def changing(set_settings):
        def set_both(settings):
            set_settings(settings)
            encoded = settings.encode()
            change_settings(encoded, len(encoded))

        return set_both

    metadata = [""]

    def set_memory_metadata(text):
        encoded = text.encode()
        set_metadata(encoded, len(encoded))
        metadata[0] = text

    def of_host(pool):
        """Memory of the host, which snapshots have from 2.14 on, and PyTorch itself knows."""
        names = ("host_segments", "host_traces") if release >= (2, 14) else ()
        try:
            theirs = call_theirs(their_snapshot, pool) if names else {}
        except RuntimeError:
            theirs = {}
        return {name: theirs.get(name, []) for name in names}

    def memory_snapshot(pool=None):
        graph, user, traces = (*(pool or (0, 0)), True)[:3]
        keep_tracebacks(True)
        try:
            result = read(snapshot, graph, user, traces)
            things = [*result["segments"]]
            things += (block for segment in result["segments"] for block in segment["blocks"])
            things += (entry for trace in result["device_traces"] for entry in trace)
            numbers = {thing["context"] for thing in things} - {None}
            if any(number % 2 for number in numbers):
                # Tracebacks of C++, which PyTorch symbolizes.
                theirs = their_snapshot(pool)
                theirs["external_annotations"] = result["external_annotations"]
                return theirs
            tracebacks = [ctypes.cast(number, ctypes.py_object).value for number in numbers]
        finally:
            keep_tracebacks(False)
        stacks = core._profiler.symbolize_tracebacks(tracebacks)
        frames = dict(zip(numbers, stacks))
        for thing in things:
            thing["frames"] = frames.get(thing.pop("context"), [])
        for entry in (entry for trace in result["device_traces"] for entry in trace):
            owner = entry.pop("pool_id")
            if release >= (2, 12):
                entry["pool_id"] = tuple(owner)
        for segment in result["segments"]:
            segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        missing = core._cuda_getDeviceCount() - len(result["device_traces"])
        result["device_traces"] += ([] for _ in range(missing))
        result |= of_host(pool)
        result["allocator_settings"] = {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "expandable_segments": all(it["is_expandable"] for it in result["segments"]),
            "graph_capture_record_stream_reuse": result.pop(
                "graph_capture_record_stream_reuse", False
            ),
        }
        if release >= (2, 13):
            result["allocator_settings"] |= {"max_round_threshold": -1, "max_cached_size": -1}
        return result

    def attach_observer(observer):
        observers.append(observer)

    def observe(device, asked, most, free):
        for observer in observers:
            observer(device, asked, most, free)

    set_observer(immortal(OBSERVE(observe)))

    def blocks_in_use(device, pool):
        blocks = read(pool_blocks, device_number(device), *pool)
        if blocks is None:
            raise RuntimeError(f"Could not find pool of id {tuple(pool)}")
        return blocks

    def check_live(device, pool, expected):
        return {address for address, *_ in blocks_in_use(device, pool)} == expected

    def get_state(device, pool):
        return PoolState(tuple(pool), blocks_in_use(device, pool))

    def set_state(device, state, stale, owners=()):
        """Storages are given by their addresses: of `stale` ones the memory is freed, and `owners` free
        it from now on."""
        import torch

        if not isinstance(state, PoolState):
            raise RuntimeError(f"expected a state of a pool, not {type(state).__name__}")
        for storage in dict.fromkeys(stale):
            core._free_And_Remove_DeleterFn(storage)
        in_use = blocks_in_use(device, state.pool)
        if {address for address, *_ in in_use} - {address for address, *_ in state.blocks}:
            raise RuntimeError(
                "Any stale tensors which are being manually freed must be passed to set checkpoint"
            )
        weak = torch.UntypedStorage._new_with_weak_ptr
        owners = {weak(owner).data_ptr(): owner for owner in owners}

        def put(blocks, owners):
            """Answers what `restore` does."""
            numbers = [number for block in blocks for number in block]
            array = (ctypes.c_ulonglong * len(numbers))(*numbers)
            refused = restore(device, *state.pool, array, len(blocks))
            if refused:
                return refused
            try:
                for address, _, asked, stream, _ in blocks:
                    if address not in owners:
                        core._cuda_cudaCachingAllocator_raw_alloc(asked, stream)
                        continue
                    owner = torch.UntypedStorage(asked, device="cuda")
                    if not swap_owner(owner._cdata, owners[address], address):
                        raise RuntimeError("this PyTorch's storages are not built as expected")
            finally:
                end_allocate_to_pool(device, *state.pool)
            return refused

        with torch.cuda.device(device):
            for address, *_ in in_use:
                core._cuda_cudaCachingAllocator_raw_delete(address)
            refused = put(state.blocks, owners)
            if refused:
                # What is in use stays so.
                put(in_use, {})
                raise RuntimeError(f"the pool cannot go back: {refused:#x} is in use")

    for name in (
        "_accelerator_setAllocatorSettings",
        "_cuda_cudaCachingAllocator_set_allocator_settings",
    ):
        if hasattr(core, name):
            setattr(core, name, changing(getattr(core, name)))
    for name, function in {
        "_cuda_memoryStats": of_device(nested_stats_of_all),
        "_cuda_resetPeakMemoryStats": of_device(reset_peaks),
        "_cuda_resetAccumulatedMemoryStats": of_device(reset_accumulated),
        "_cuda_getMemoryFraction": of_device(fraction),
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": record_history_legacy,
        "_cuda_isHistoryEnabled": lambda: is_recorded(),
        "_cuda_memorySnapshot": memory_snapshot,
        "_cuda_setMemoryMetadata": set_memory_metadata,
        "_cuda_getMemoryMetadata": lambda: metadata[0],
        "_cuda_attach_out_of_memory_observer": attach_observer,
        "_cuda_getCheckpointState": get_state,
        "_cuda_setCheckpointPoolState": set_state,
        "_cuda_checkPoolLiveAllocations": check_live,
        "_accelerator_getDeviceStats": of_device(nested_stats),
        "_accelerator_resetPeakStats": of_device(reset_peaks),
        "_accelerator_resetAccumulatedStats": of_device(reset_accumulated),
    }.items():
        if hasattr(core, name):
            setattr(core, name, function)


def complain(line):
    print(f"concertina: {line}", file=sys.stderr)


module = types.ModuleType("_concertina")
module.attach = attach
module.is_active = lambda: attach_object(False)
module.mistakes = lambda: read(mistakes)
# Whether no other allocator takes the place of ours.
module.stays = False
sys.modules["_concertina"] = module
attach()
