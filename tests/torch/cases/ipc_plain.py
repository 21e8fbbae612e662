# With expandable_segments:False tensors lie in allocations of CUDA's own, and whoever opens their handles need
# not have concertina: also where only PyTorch is attached, and the library sees none of the program's calls.
#: attach plain run native
#: env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
import torch
from case import ATTACH, MIB, address_range, attribute, bare, base_allocation, ipc_handle, pattern, to_gpu

OPEN = """
import sys, torch
from case import ipc_close, ipc_open, pattern, read, write
torch.cuda.init()
handle, offset, size, seed = bytes.fromhex(sys.argv[1]), *map(int, sys.argv[2:])
status, start = ipc_open(handle)
assert status == 0, status
assert torch.equal(read(start + offset, size), pattern(size, seed))
write(start + offset, pattern(size, 10 + seed))
assert ipc_close(start) == 0
"""
RANGE_START_ADDR = 11


def main():
    sizes = [1000, 700, 3 * MIB, 30 * MIB + 5]
    tensors = [to_gpu(pattern(size, seed)) for seed, size in enumerate(sizes)]
    for seed, tensor in enumerate(tensors):
        address = tensor.data_ptr()
        start = attribute(address, RANGE_START_ADDR)
        status, handle = ipc_handle(start)
        assert status == 0, status
        if ATTACH != "native":
            # Libraries ask PyTorch, or CUDA.
            assert base_allocation(address) == address_range(address)
        assert ipc_handle(address + 100) == (0, handle)
        bare(OPEN, handle.hex(), address - start, tensor.numel(), seed)
        assert torch.equal(tensor.cpu(), pattern(tensor.numel(), 10 + seed)), seed


if __name__ == "__main__":
    main()
