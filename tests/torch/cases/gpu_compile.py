# torch.compile(mode="reduce-overhead"), beside the same under PyTorch's own allocator: inference through
# functions that call one another in changing order, while their results are still in use, and training,
# with memory that others take and give back meanwhile. The results are equal.
#: only gpu
#: attach plain install native
#: needs triton
import os
import tempfile

from case import both

PROGRAM = '''
import torch
from torch import nn
from torch._inductor.cudagraph_trees import get_container


class Block(nn.Module):
    def __init__(self, width, times=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, times * width)
        self.outer = nn.Linear(times * width, width)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


def others(turn):
    """Memory that is not the graphs'."""
    kept = [torch.full((1 + (turn * 7919 + it) % (1 << 20),), it, device="cuda") for it in range(20)]
    return kept[turn % 2 :: 2]


def inference():
    torch.manual_seed(1)
    # Of different sizes: each is a function of its own.
    blocks = [Block(256, times).cuda().eval() for times in (2, 3, 4)]
    blocks = [torch.compile(block, mode="reduce-overhead") for block in blocks]
    sums, kept = [], []
    with torch.no_grad():
        for turn in range(24):
            torch.compiler.cudagraph_mark_step_begin()
            around = others(turn)
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(turn)).cuda()
            order = [(turn * 5 + it * (1 + turn // 8)) % 3 for it in range(3)]
            results = [x]
            for number in order:
                results.append(blocks[number](results[-1]))
            # All are in use until here, and the copies beyond.
            sums += [result.double().sum().item() for result in results]
            kept.append(results[-1].clone())
            assert all((it == it[0]).all() for it in around)
    sums += [it.double().sum().item() for it in kept]
    manager = get_container(0).tree_manager
    assert manager is not None and manager.debug_checkpointing_counter > 0
    return sums


def training():
    torch.manual_seed(2)
    model = nn.Sequential(Block(256), Block(256), nn.Linear(256, 10)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(30):
        torch.compiler.cudagraph_mark_step_begin()
        around = others(step)
        random = torch.Generator().manual_seed(step)
        # Two shapes: two graphs forward and two backward.
        x = torch.randn(32 + 32 * (step % 2), 256, generator=random).cuda()
        y = torch.randint(10, (len(x),), generator=random).cuda()
        loss = nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        assert all((it == it[0]).all() for it in around)
    return losses


def main():
    torch.use_deterministic_algorithms(True, warn_only=True)
    results = inference()
    torch._dynamo.reset()
    return results + training()
'''

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as kernels:
        # The same kernels for both.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = kernels
        mine, theirs = both(PROGRAM, "main()")
    assert mine == theirs, [(a, b) for a, b in zip(mine, theirs) if a != b]
    assert len(set(mine)) > 10, mine
