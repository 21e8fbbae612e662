# Out of memory is raised wherever PyTorch allocates: in backward, on other threads, for other
# frameworks; and the program goes on.
#: alone
#: memory 256
import threading

import torch
from case import MIB, raises

TOO_MUCH = torch.cuda.mem_get_info()[1] * 2


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
        return gradient


x = torch.empty(10, device="cuda", requires_grad=True)
for turn in range(20):
    y = Greedy.apply(x)
    raises(torch.OutOfMemoryError, lambda: y.backward(torch.empty_like(y)))

raises(torch.OutOfMemoryError, lambda: torch.cuda.caching_allocator_alloc(TOO_MUCH))
address = torch.cuda.caching_allocator_alloc(MIB)
assert torch.cuda.memory_allocated() >= MIB
torch.cuda.caching_allocator_delete(address)

caught = []


def work():
    for turn in range(50):
        try:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            caught.append(turn)
        torch.empty(MIB, dtype=torch.uint8, device="cuda")


threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(caught) == 8 * 50, len(caught)
del x, y
assert torch.cuda.memory_allocated() == 0
