# With the two lines, as with install(), and no more, the library does not see a program's own calls: cudaIpcGetMemHandle of
# a tensor has CUDA's error for mapped memory, as with PyTorch's expandable segments. docs/several-gpus.md
# says what to do; `ipc_plain` has it.
#: attach plain
from case import MIB, ipc_handle, pattern, to_gpu

tensor = to_gpu(pattern(3 * MIB))
status, _ = ipc_handle(tensor.data_ptr())
assert status == 1, status
