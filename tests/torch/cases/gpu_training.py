# Training as people do it, beside the same under PyTorch's own allocator: mixed precision with a
# GradScaler, activation checkpointing, accumulated gradients, a DataLoader with workers, pinned
# memory and copies that do not block, and backward passes on several threads. The losses are equal.
#: only gpu
#: attach plain install native
import os

from case import both

PROGRAM = '''
import threading
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
            for _ in range(4)
        )
        self.last = nn.Linear(256, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def main():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
    loader = DataLoader(data, batch_size=32, num_workers=2, pin_memory=True)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
            losses.append(loss.item())
            if step % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
    sums = [None] * 4

    def work(number):
        own = torch.Generator().manual_seed(number)
        x = torch.randn(64, 64, generator=own).cuda()
        weight = torch.randn(64, 64, generator=own).cuda().requires_grad_()
        for _ in range(50):
            y = (x @ weight).relu().sum()
            (gradient,) = torch.autograd.grad(y, weight)
        sums[number] = gradient.double().sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return losses + sums
'''

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
if __name__ == "__main__":
    mine, theirs = both(PROGRAM, "main()")
    assert mine == theirs, [(a, b) for a, b in zip(mine, theirs) if a != b]
    assert sum(mine[16:32]) < sum(mine[:16])
