# Plain segments are shared by CUDA's own handles, also with processes that have PyTorch's own allocator.
#: attach plain native
#: env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
import torch
import torch.multiprocessing as mp
from case import ATTACH, MIB, pattern, stats, to_gpu


def other(inbox, outbox):
    if ATTACH == "native":
        # This one has ours, the one that started it has PyTorch's.
        import concertina

        concertina.install()
    before, tensor = inbox.get(), inbox.get()
    assert torch.equal(before.cpu(), pattern(500, 1))
    assert torch.equal(tensor.cpu(), pattern(30 * MIB, 2))
    tensor.copy_(pattern(30 * MIB, 3))
    del before, tensor
    own = [to_gpu(pattern(size, size)) for size in (1000, 2000, 30 * MIB)]
    for it in own:
        outbox.put(it)
    assert inbox.get() == "done"
    assert stats()["driver_calls"]["cuMemAlloc"]["count"] > 0
    assert stats()["driver_calls"]["cuMemCreate"]["count"] == 0


def main():
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=other, args=(inbox, outbox), daemon=True)
    process.start()
    before, tensor = to_gpu(pattern(500, 1)), to_gpu(pattern(30 * MIB, 2))
    inbox.put(before)
    inbox.put(tensor)
    for size in 1000, 2000, 30 * MIB:
        theirs = outbox.get(timeout=60)
        assert torch.equal(theirs.cpu(), pattern(size, size))
    del theirs
    inbox.put("done")
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(tensor.cpu(), pattern(30 * MIB, 3))
    assert torch.equal(before.cpu(), pattern(500, 1))


if __name__ == "__main__":
    main()
