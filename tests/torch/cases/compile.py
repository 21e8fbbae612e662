# Compiled functions whose graphs share one pool: its state is kept after each, and gone back to when
# another graph is captured behind one that was replayed. The same results as without compiling, tensors
# that are still in use among them; and all of it given back in the end.
#: attach plain install native
#: memory 512
import gc

import torch
import torch._inductor.config
from case import GPU, MIB, pattern
from torch._inductor.cudagraph_trees import get_container, reset_cudagraph_trees

torch._inductor.config.triton.slow_path_cudagraph_asserts = True
# Whatever is done here is made of copies: the simulated GPU computes nothing. What is given to a graph is
# copied to where the graph expects it, by one kernel for all.
if not GPU:

    def copy_each(into, tensors):
        for there, tensor in zip(into, tensors):
            there.copy_(tensor)

    torch._foreach_copy_ = copy_each


@torch.compile(backend="cudagraphs", dynamic=False)
def first(tensor):
    middle = tensor.clone()
    return middle.clone(), middle[MIB // 8 :].clone()


@torch.compile(backend="cudagraphs", dynamic=False)
def second(tensor):
    return tensor.clone().clone()


@torch.compile(backend="cudagraphs", dynamic=False)
def third(tensor):
    parts = [part.clone() for part in tensor.split(MIB // 8)]
    return parts[1].clone(), parts[0]


sizes = MIB // 2, 3 * MIB
hosts = {(size, seed): pattern(size, seed) for size in sizes for seed in range(6)}
other = pattern(2 * MIB, 99)
with torch.no_grad():
    for turn in range(6):
        for size in sizes:
            host = hosts[size, turn]
            torch.compiler.cudagraph_mark_step_begin()
            copy, rest = first(host.cuda())
            # From the fourth turn on what follows `first` is another function, which is captured behind
            # a graph that was only replayed.
            if turn < 3:
                after = second(rest)
            else:
                after, before = third(rest)
                assert torch.equal(before.cpu(), host[MIB // 8 : MIB // 4])
            eager = other.cuda()
            assert torch.equal(copy.cpu(), host), (turn, size)
            assert torch.equal(rest.cpu(), host[MIB // 8 :]), (turn, size)
            assert torch.equal(after.cpu(), host[MIB // 8 :] if turn < 3 else host[MIB // 4 : 3 * MIB // 8])
            last = second(copy)
            assert torch.equal(last.cpu(), host) and torch.equal(copy.cpu(), host), (turn, size)
            assert torch.equal(eager.cpu(), other)
manager = get_container(0).tree_manager
assert manager.debug_checkpointing_counter >= len(sizes)


# Training: forward and backward are graphs of one pool, and what the one keeps the other needs.
class Copies(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        kept = tensor.clone()
        context.save_for_backward(kept)
        return kept.clone()

    @staticmethod
    def backward(context, gradient):
        (kept,) = context.saved_tensors
        return gradient.clone() * (kept == kept) if GPU else gradient.clone()


@torch.compile(backend="cudagraphs", dynamic=False)
def layers(tensor):
    return Copies.apply(Copies.apply(tensor))


for turn in range(5):
    values, slopes = torch.rand((2, MIB // 8), generator=torch.Generator().manual_seed(turn))
    torch.compiler.cudagraph_mark_step_begin()
    leaf = values.cuda().requires_grad_()
    result = layers(leaf)
    assert torch.equal(result.detach().cpu(), values), turn
    result.backward(slopes.cuda())
    assert torch.equal(leaf.grad.cpu(), slopes), turn
del leaf, result, manager, copy, rest, after, before, last, eager
torch._dynamo.reset()
reset_cudagraph_trees()
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
