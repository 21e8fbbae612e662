# What was shared stays as long as another process has it, and no longer; whichever process ends first.
#: attach plain
#: memory 512
#: env CONCERTINA_CONF=chunk_size_mb:2
import os
import signal

import torch
import torch.multiprocessing as mp
from case import MIB, counter, pattern, raises, stats, to_gpu
from torch.multiprocessing.reductions import reduce_tensor


def calls(name):
    return stats()["driver_calls"][name]["count"]


def holder(inbox, outbox):
    """Holds what it gets until it is told to let go, and says what is in it; interrupted all the time."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    held = []
    while (order := inbox.get()) != "end":
        match order:
            case "look":
                outbox.put([pattern(it.numel(), 0).equal(it.cpu()) for it in held])
            case "drop":
                held.clear()
                outbox.put("dropped")
            case "imports":
                outbox.put(calls("cuMemImportFromShareableHandle"))
            case "unmapped":
                outbox.put(calls("cuMemUnmap"))
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                held.append(order)
                outbox.put("got it")
        del order


def giver(outbox, end):
    """Gives a tensor away and ends: at once, or when it is told."""
    own = to_gpu(pattern(3 * MIB, 0))
    outbox.put(own)
    end.wait()


class Other:
    def __init__(self):
        context = mp.get_context("spawn")
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=holder, args=(self.inbox, self.outbox), daemon=True)
        self.process.start()

    def ask(self, order):
        self.inbox.put(order)
        return self.outbox.get(timeout=60)


def sent_and_freed(other):
    """The sender lets go first: the memory is nobody else's until the other lets go, too."""
    shared = to_gpu(pattern(40 * MIB, 0))
    assert other.ask(shared) == "got it"
    before = counter("allocated_bytes.all.current")
    del shared
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert counter("allocated_bytes.all.current") == before
    more = [to_gpu(pattern(40 * MIB, seed)) for seed in range(1, 4)]
    assert other.ask("look") == [True]
    assert other.ask("drop") == "dropped"
    torch.cuda.ipc_collect()
    assert counter("allocated_bytes.all.current") == 3 * 40 * MIB
    del more
    torch.cuda.empty_cache()
    assert counter("reserved_bytes.all.current") == 0


def mapped_once(other):
    """Many tensors of one piece of memory are mapped once, and taken down with the last."""
    imports, unmapped = other.ask("imports"), other.ask("unmapped")
    many = [to_gpu(pattern(1000, 0)) for _ in range(200)]
    assert counter("reserved_bytes.all.current") == 2 * MIB
    for tensor in many:
        assert other.ask(tensor) == "got it"
    assert other.ask("look") == [True] * 200
    assert other.ask("imports") == imports + 1
    assert other.ask("unmapped") == unmapped
    assert other.ask("drop") == "dropped"
    assert other.ask("unmapped") == unmapped + 1
    del many, tensor
    torch.cuda.ipc_collect()


def moved(other):
    """Chunks that were shared, and then moved, are shared from where they are."""
    blocks = [to_gpu(pattern(2 * MIB, 0)) for _ in range(8)]
    for block in blocks:
        assert other.ask(block) == "got it"
    assert other.ask("look") == [True] * 8
    assert other.ask("drop") == "dropped"
    stitches = stats()["stitches"]
    del block
    blocks = blocks[::2]
    torch.cuda.ipc_collect()
    large = to_gpu(pattern(6 * MIB, 0))
    assert stats()["stitches"] > stitches
    assert other.ask(large) == "got it"
    assert other.ask(blocks[1]) == "got it"
    assert other.ask("look") == [True, True]
    assert other.ask("drop") == "dropped"


def collected_when_out_of_memory(other):
    """Memory that the others are done with is found when there is no other. It is a great many chunks."""
    shared = to_gpu(pattern(300 * MIB, 0))
    imports = other.ask("imports")
    assert other.ask(shared) == "got it"
    chunks = other.ask("imports") - imports
    assert chunks == 150, chunks
    assert other.ask("look") == [True]
    del shared
    assert other.ask("drop") == "dropped"
    again = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    del again


def receiver_dies(other):
    shared = to_gpu(pattern(3 * MIB, 0))
    assert other.ask(shared) == "got it"
    other.inbox.put("die")
    other.process.join(60)
    assert other.process.exitcode == -signal.SIGKILL
    shared.copy_(pattern(3 * MIB, 1))
    assert torch.equal(shared.cpu(), pattern(3 * MIB, 1))


def sender_ends():
    context = mp.get_context("spawn")
    end, queue = context.Event(), context.SimpleQueue()
    process = context.Process(target=giver, args=(queue, end), daemon=True)
    process.start()
    got = queue.get()
    assert torch.equal(got.cpu(), pattern(3 * MIB, 0))
    end.set()
    process.join(60)
    # What is open stays.
    assert torch.equal(got.cpu(), pattern(3 * MIB, 0))
    got.copy_(pattern(3 * MIB, 1))
    assert torch.equal(got.cpu(), pattern(3 * MIB, 1))
    del got
    # What is not cannot be opened any more.
    process = context.Process(target=giver, args=(queue, end), daemon=True)
    process.start()
    process.join(60)
    error = str(raises(RuntimeError, queue.get))
    assert "process" in error or "CUDA error" in error, error


def itself():
    """CUDA does not let a process open its own events, so PyTorch cannot rebuild here what it shared from
    here, whatever the allocator. It counts as sent for good."""
    own = to_gpu(pattern(5 * MIB, 0))
    rebuild, arguments = reduce_tensor(own)
    assert "invalid device context" in str(raises(RuntimeError, lambda: rebuild(*arguments)))
    assert torch.equal(own.cpu(), pattern(5 * MIB, 0))
    del own


def main():
    other = Other()
    moved(other)
    sent_and_freed(other)
    mapped_once(other)
    collected_when_out_of_memory(other)
    receiver_dies(other)
    sender_ends()
    itself()


if __name__ == "__main__":
    main()
    # The killed process still holds a tensor of this one. PyTorch lets go of that in a destructor which may
    # run after what it uses is gone, and then crashes at exit, whatever the allocator.
    os._exit(0)
