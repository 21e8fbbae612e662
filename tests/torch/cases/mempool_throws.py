# The allocator of a torch.cuda.MemPool throws C++ exceptions: they come to the program.
#: attach plain install
#: memory 256
#: torch 2.9
import ctypes
import subprocess

import torch
from case import MIB, raises

SOURCE = """
#include <cstddef>
#include <dlfcn.h>
#include <stdexcept>
extern "C" {
int refusing = 1;
void *allocate(size_t size, int, void *) {
    if (refusing) throw std::runtime_error("not today");
    void *found = nullptr;
    reinterpret_cast<int (*)(void **, size_t)>(dlsym(RTLD_DEFAULT, "cudaMalloc"))(&found, size);
    return found;
}
void release(void *address, size_t, int, void *) {
    reinterpret_cast<int (*)(void *)>(dlsym(RTLD_DEFAULT, "cudaFree"))(address);
    if (refusing) throw std::runtime_error("not gladly");
}
}
"""
with open("own.cpp", "w") as file:
    file.write(SOURCE)
subprocess.run(["c++", "-shared", "-fPIC", "-o", "own.so", "own.cpp", "-ldl"], check=True)
ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", ctypes.RTLD_GLOBAL)
refusing = ctypes.c_int.in_dll(ctypes.CDLL("./own.so"), "refusing")
own = torch.cuda.memory.CUDAPluggableAllocator("./own.so", "allocate", "release")


def tensor_in(pool):
    with torch.cuda.use_mem_pool(pool):
        return torch.empty(MIB, device="cuda")


def tensor_of_a_pool_that_goes():
    return tensor_in(torch.cuda.MemPool(own.allocator()))


pool = torch.cuda.MemPool(own.allocator())
for _ in range(3):
    assert "not today" in str(raises(RuntimeError, lambda: tensor_in(pool)))
refusing.value = 0
tensor = tensor_in(pool)
left = tensor_of_a_pool_that_goes()
del left
refusing.value = 1
assert "not gladly" in str(raises(RuntimeError, torch.cuda.empty_cache))
# The others go on.
outside = torch.empty(MIB, device="cuda")
refusing.value = 0
del tensor, pool
torch.cuda.empty_cache()
del outside
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == 0
