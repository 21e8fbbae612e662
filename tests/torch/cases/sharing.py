# CUDA tensors in another process and back: what one writes the other reads, however large it is, and
# the memory is used again only when everybody is done with it.
#: core
#: attach plain install native
#: env STANDIN_PACE=held
import torch
import torch.multiprocessing as mp
from case import ATTACH, MIB, pattern, stats, to_gpu

SIZES = [1, 1000, 3 * MIB, 50 * MIB + 513]


def other(inbox, outbox):
    """What the other process does: it says what it sees, writes, and sends something of its own."""
    for seed, size in enumerate(SIZES):
        tensor = inbox.get()
        outbox.put((tensor.is_cuda, torch.equal(tensor.cpu(), pattern(size, seed))))
        tensor.copy_(pattern(size, 100 + seed))
        torch.cuda.synchronize()
        outbox.put("written")
        # Work that may still read it when it goes.
        spare = torch.empty_like(tensor)
        spare.copy_(tensor, non_blocking=True)
        del tensor
        assert torch.equal(spare.cpu(), pattern(size, 100 + seed))
    # Two parts of one tensor, and a view of it, are one memory.
    whole, part = inbox.get(), inbox.get()
    part.copy_(pattern(100, 7))
    torch.cuda.synchronize()
    assert torch.equal(whole[50:150].cpu(), pattern(100, 7))
    del whole, part
    # Its own, for the one that asked; kept until that one has it.
    own = to_gpu(pattern(5 * MIB, 9))
    outbox.put(own)
    assert inbox.get() == "have it"
    # What it got cannot be sent on, but a copy can.
    got = inbox.get()
    try:
        got.share_memory_()
        torch.multiprocessing.reductions.reduce_tensor(got)
        outbox.put("sent on")
    except RuntimeError as error:
        outbox.put(str(error))
    copy = to_gpu(got.cpu())
    outbox.put(copy)
    del got
    assert inbox.get() == "have it, too"


def exchange(method):
    context = mp.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=other, args=(inbox, outbox), daemon=True)
    process.start()
    for seed, size in enumerate(SIZES):
        tensor = to_gpu(pattern(size, seed))
        inbox.put(tensor)
        assert outbox.get(timeout=60) == (True, True), (method, size)
        assert outbox.get(timeout=60) == "written"
        assert torch.equal(tensor.cpu(), pattern(size, 100 + seed)), (method, size)
    whole = to_gpu(pattern(4096, 1))
    inbox.put(whole)
    inbox.put(whole[50:150])
    theirs = outbox.get(timeout=60)
    assert torch.equal(theirs.cpu(), pattern(5 * MIB, 9))
    del theirs
    inbox.put("have it")
    assert torch.equal(whole[50:150].cpu(), pattern(100, 7))
    inbox.put(whole)
    assert "received from another process" in outbox.get(timeout=60)
    copy = outbox.get(timeout=60)
    assert torch.equal(copy.cpu(), whole.cpu())
    del copy
    inbox.put("have it, too")
    process.join(60)
    assert process.exitcode == 0, (method, process.exitcode)


def main():
    exchange("spawn")
    if ATTACH == "plain":
        exchange("forkserver")
    # Everything came back: nobody uses anything any more.
    torch.cuda.ipc_collect()
    if ATTACH != "native":
        assert stats()["live_blocks"] == 0, stats()["live_blocks"]


if __name__ == "__main__":
    main()
