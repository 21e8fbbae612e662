# A device that makes no chunks that could be shared: everything else works, and the error says what to
# set.
#: attach plain
#: only sim
#: env STANDIN_FAIL=cuMemCreate:1:801
import torch
from case import MIB, pattern, raises, stats, to_gpu
from torch.multiprocessing.reductions import reduce_tensor

tensors = [to_gpu(pattern(3 * MIB, seed)) for seed in range(3)]
for seed, tensor in enumerate(tensors):
    assert torch.equal(tensor.cpu(), pattern(3 * MIB, seed))
assert stats()["driver_calls"]["cuMemCreate"]["failed"] == 1
assert stats()["driver_errors"] == 0
error = str(raises(RuntimeError, lambda: reduce_tensor(tensors[0])))
assert "CONCERTINA_CONF=expandable_segments:False" in error, error
