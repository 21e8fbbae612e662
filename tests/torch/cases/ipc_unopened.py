# A process without the library gets CUDA's ordinary error for the handle of a tensor in the pool's memory, and
# the one that shared it says what to do.
#: attach run
#: says CONCERTINA_CONF=expandable_segments:False
import torch
from case import MIB, bare, ipc_handle, pattern, to_gpu

OPEN = """
import sys, torch
from case import ipc_open
torch.cuda.init()
status, _ = ipc_open(bytes.fromhex(sys.argv[1]))
assert status in (1, 400), status
"""


def main():
    tensor = to_gpu(pattern(3 * MIB))
    status, handle = ipc_handle(tensor.data_ptr())
    assert status == 0, status
    bare(OPEN, handle.hex())
    assert torch.equal(tensor.cpu(), pattern(3 * MIB))


if __name__ == "__main__":
    main()
