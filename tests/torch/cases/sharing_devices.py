# Each device's memory is shared on its own.
#: attach plain native
#: devices 2
import torch
import torch.multiprocessing as mp
from case import MIB, pattern


def other(inbox, outbox):
    for device in 1, 0:
        tensor = inbox.get()
        assert tensor.device == torch.device("cuda", device)
        assert torch.equal(tensor.cpu(), pattern(30 * MIB, device))
        tensor.copy_(pattern(30 * MIB, 2 + device))
        torch.cuda.synchronize(device)
        del tensor
        outbox.put("written")


def main():
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=other, args=(inbox, outbox), daemon=True)
    process.start()
    for device in 1, 0:
        tensor = torch.empty(30 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
        tensor.copy_(pattern(30 * MIB, device))
        inbox.put(tensor)
        assert outbox.get(timeout=60) == "written"
        assert torch.equal(tensor.cpu(), pattern(30 * MIB, 2 + device))
    process.join(60)
    assert process.exitcode == 0


if __name__ == "__main__":
    main()
