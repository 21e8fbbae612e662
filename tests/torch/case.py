"""What cases share."""

import ctypes
import json
import os
import subprocess
import sys
import types

import torch

MIB = 1 << 20
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

# Whether a real GPU is under the case: kernels compute, and numbers mean something.
GPU = os.environ["CONCERTINA_TEST_SIDE"] == "gpu"
ATTACH = os.environ["CONCERTINA_TEST_ATTACH"]


def library():
    """The library that is attached, with the types of its functions."""
    found = ctypes.CDLL(os.environ["CONCERTINA_LIBRARY"])
    found.concertina_stats_json.restype = ctypes.c_size_t
    found.concertina_stats_json.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return found


def stats(device=0):
    """concertina's statistics of a device, however it was attached."""
    json_of = library().concertina_stats_json
    length = json_of(None, 0)
    while True:
        text = ctypes.create_string_buffer(length + 1)
        needed = json_of(text, len(text))
        if needed <= length:
            break
        length = needed
    devices = json.loads(text.value)["devices"]
    return next(it for it in devices if it["device"] == device)


def counter(name, device=0):
    """One of PyTorch's counters, of concertina's statistics."""
    return stats(device)["memory_stats"][name]


def bare(program, *arguments):
    """What a program says that runs in a process without concertina, which has to end well."""
    # Under `concertina run`, too, which children inherit by these and by PYTHONPATH.
    inherited = ("CONCERTINA_STATS", "CONCERTINA_RUN", "LD_PRELOAD")
    path = f"import sys; sys.path.append({os.path.dirname(os.path.abspath(__file__))!r})\n"
    done = subprocess.run(
        [sys.executable, "-E", "-c", path + program, *map(str, arguments)],
        env={key: value for key, value in os.environ.items() if key not in inherited},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def both(program, result):
    """What an expression is after a program has run: here, and in a process with PyTorch's own allocator."""
    native = bare(f"{program}\nimport json; print(json.dumps({result}))")
    # Compiling looks a function's module up by its name.
    module = sys.modules["program"] = types.ModuleType("program")
    exec(program, vars(module))
    return eval(result, vars(module)), json.loads(native.splitlines()[-1])


# What the allocator's header wants of CUDA, which a wheel does not bring along.
ALLOCATOR_HEADERS = {
    "cuda_runtime_api.h": """
        #pragma once
        #include <cstddef>
        typedef struct CUstream_st *cudaStream_t;
        typedef int cudaError_t;
        inline cudaError_t cudaMemGetInfo(size_t *, size_t *) { return 0; }
    """,
    "c10/cuda/CUDAStream.h": """
        #pragma once
        #include <cuda_runtime_api.h>
        #include <c10/core/DeviceGuard.h>
        #include <c10/cuda/CUDAMacros.h>
        namespace c10::cuda { struct CUDAStream { explicit CUDAStream(c10::Stream) {} }; }
    """,
    "c10/cuda/CUDAException.h": """
        #pragma once
        #include <c10/cuda/CUDAMacros.h>
        #include <cuda_runtime_api.h>
        #define C10_CUDA_CHECK(it) (void)(it)
    """,
    "c10/cuda/CUDAGraphsC10Utils.h": "#pragma once\n#include <c10/cuda/CUDAStream.h>",
}


def compiled(source, headers=()):
    """The functions of a C++ source that uses PyTorch's headers, with some in their place."""
    home = os.path.dirname(torch.__file__)
    for name in headers:
        os.makedirs(os.path.dirname(f"headers/{name}"), exist_ok=True)
        with open(f"headers/{name}", "w") as file:
            file.write(headers[name])
    with open("caller.cpp", "w") as file:
        file.write(source)
    standard = "c++20" if TORCH >= (2, 14) else "c++17"
    command = ["c++", f"-std={standard}", "-shared", "-fPIC", "-Iheaders", f"-I{home}/include"]
    command += [f"-L{home}/lib", "-o", "caller.so", "caller.cpp", "-ltorch_cuda", "-lc10_cuda", "-lc10"]
    command += ["-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(command, check=True)
    # With the interpreter's lock held, as an extension's functions are.
    return ctypes.PyDLL("./caller.so")


class IpcHandle(ctypes.Structure):
    """CUDA's handle for memory of another process."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def ipc_handle(address):
    """What cudaIpcGetMemHandle answers, and the handle as bytes."""
    handle = IpcHandle()
    runtime = cuda_runtime()
    status = runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
    runtime.cudaGetLastError()
    return status, bytes(handle.bytes)


def ipc_open(handle):
    """What cudaIpcOpenMemHandle answers, and the address of the memory here."""
    address, flags = ctypes.c_void_p(), 1
    by_value = IpcHandle.from_buffer_copy(handle)
    runtime = cuda_runtime()
    status = runtime.cudaIpcOpenMemHandle(ctypes.byref(address), by_value, flags)
    # PyTorch would take it for its own.
    runtime.cudaGetLastError()
    return status, address.value


def ipc_close(address):
    """What cudaIpcCloseMemHandle answers."""
    runtime = cuda_runtime()
    status = runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address))
    runtime.cudaGetLastError()
    return status


def cuda_runtime():
    """The CUDA runtime that PyTorch uses."""
    lines = open("/proc/self/maps").read().splitlines()
    found = ctypes.CDLL(next(line.split()[-1] for line in lines if "libcudart" in line))
    found.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, IpcHandle, ctypes.c_uint]
    return found


def read(address, size):
    """So many bytes of the GPU, on the host."""
    there = torch.empty(size, dtype=torch.uint8)
    arguments = [ctypes.c_void_p(there.data_ptr()), ctypes.c_void_p(address), ctypes.c_size_t(size)]
    status = cuda_runtime().cudaMemcpy(*arguments, 2)
    assert status == 0, status
    return there


def write(address, host):
    """Bytes of the host, to the GPU."""
    size = ctypes.c_size_t(host.numel())
    arguments = [ctypes.c_void_p(address), ctypes.c_void_p(host.data_ptr()), size]
    status = cuda_runtime().cudaMemcpy(*arguments, 1)
    assert status == 0, status


def attribute(address, number):
    """One of cuPointerGetAttribute's, of eight bytes or fewer."""
    value = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(address))
    assert status == 0, (number, status)
    return value.value


def base_allocation(address):
    """Start and size of the allocation that a tensor is part of, as PyTorch's allocator tells C++."""
    base, size = library().concertina_base_alloc, ctypes.c_size_t()
    base.restype, base.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    return base(address, ctypes.byref(size)), size.value


def address_range(address):
    """Start and size of the allocation around an address, as cuMemGetAddressRange has them."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemGetAddressRange_v2(
        ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)
    )
    assert status == 0, status
    return start.value, size.value


def pattern(count, seed=1):
    """So many bytes that differ, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def to_gpu(host, **how):
    """A copy on the GPU, made by one copy of bytes."""
    there = torch.empty_like(host, device="cuda", **how)
    there.copy_(host)
    return there


def raises(kind, act):
    """The error of this kind that `act` raises."""
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")
