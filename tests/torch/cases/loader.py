# A DataLoader that pins what its worker processes load: those are forked from a process with a GPU.
import torch
from case import to_gpu
from torch.utils.data import DataLoader, TensorDataset


def main():
    to_gpu(torch.ones(10))
    data = torch.arange(4096, dtype=torch.float32).reshape(256, 16)
    loader = DataLoader(
        TensorDataset(data), batch_size=32, num_workers=2, pin_memory=True, persistent_workers=False
    )
    batches = []
    for (batch,) in loader:
        assert batch.is_pinned()
        batches.append(batch.to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([batch.cpu() for batch in batches]), data)


if __name__ == "__main__":
    main()
