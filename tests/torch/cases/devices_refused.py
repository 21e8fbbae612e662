# A device that says that it reaches another's memory, and then gets no access to it: each has memory of its
# own all the same, in this process and from another, and one line says so.
#: devices 2
#: env STANDIN_PEERS=2
#: only sim
#: says says that it reaches the memory of device
import torch
import torch.multiprocessing as mp
from case import MIB, pattern, stats


def other(inbox, outbox):
    for device in range(2):
        tensor = inbox.get()
        outbox.put(torch.equal(tensor.cpu(), pattern(30 * MIB, device)))
        del tensor


def main():
    tensors = [pattern(30 * MIB, device).to(f"cuda:{device}") for device in range(2)]
    for device, tensor in enumerate(tensors):
        assert torch.equal(tensor.cpu(), pattern(30 * MIB, device))
    # Each mapping is tried with the other device once, not again and again.
    failed = [stats(device)["driver_calls"]["cuMemSetAccess"]["failed"] for device in range(2)]
    more = [pattern(300 * MIB, device).to(f"cuda:{device}") for device in range(2)]
    for device in range(2):
        assert torch.equal(more[device].cpu(), pattern(300 * MIB, device))
        calls = stats(device)["driver_calls"]["cuMemSetAccess"]
        assert calls["failed"] == failed[device] == 2, (calls, failed)
    context = mp.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=other, args=(inbox, outbox), daemon=True)
    process.start()
    for tensor in tensors:
        inbox.put(tensor)
        assert outbox.get() is True
    process.join(60)
    assert process.exitcode == 0


if __name__ == "__main__":
    main()
