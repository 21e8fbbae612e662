# The allocator is changed on a thread that is not the main one, which waits for it meanwhile: nothing
# of Python can be fitted then, but errors and streams are safe from the first allocation on, and the
# rest is there once the main thread goes on.
#: attach native
#: only sim
#: env STANDIN_PACE=held
import os
import threading

import torch
from case import MIB, raises

problems = []


def work():
    try:
        library = os.environ["CONCERTINA_LIBRARY"]
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            library, "concertina_malloc", "concertina_free"
        )
        torch.cuda.memory.change_current_allocator(allocator)
        first = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 50, device="cuda"))
        # What another stream uses is not handed out again before that stream is done.
        side = torch.cuda.Stream()
        there = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(side):
            there.copy_(first, non_blocking=True)
        first.record_stream(side)
        address = first.data_ptr()
        del first
        assert torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr() != address
    except BaseException as error:
        problems.append(error)


thread = threading.Thread(target=work)
thread.start()
thread.join()
assert not problems, problems
assert torch.cuda.memory_allocated() == 0
assert torch.cuda.memory_stats()["num_ooms"] == 1
