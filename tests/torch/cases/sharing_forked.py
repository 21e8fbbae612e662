# A forked child has no part in what its parent shares: where it lives longer, whoever asks for the memory
# is told that it is gone, and does not wait for an answer.
#: attach plain
#: memory 256
#: only sim
import os

import torch.multiprocessing as mp
from case import MIB, pattern, raises, to_gpu


def giver(outbox, child_ends):
    """Gives a tensor away and ends. A child of it goes on."""
    own = to_gpu(pattern(3 * MIB, 0))
    outbox.put(own)
    if os.fork() == 0:
        child_ends.wait()
        os._exit(0)


def main():
    context = mp.get_context("spawn")
    queue, child_ends = context.SimpleQueue(), context.Event()
    process = context.Process(target=giver, args=(queue, child_ends), daemon=True)
    process.start()
    # With a limit it would wait for all that hold the process's pipe, and so for the child.
    process.join()
    error = str(raises(RuntimeError, queue.get))
    child_ends.set()
    assert "has ended" in error, error


if __name__ == "__main__":
    main()
