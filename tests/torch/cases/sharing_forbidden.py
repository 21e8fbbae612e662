# Where the system forbids what sharing mapped memory needs, the error says what to set; with that it
# works.
#: attach plain
#: only sim
import ctypes
import os
import struct
import sys

import torch
import torch.multiprocessing as mp
from case import MIB, pattern, raises, to_gpu
from torch.multiprocessing.reductions import reduce_tensor

PLAIN = "expandable_segments:False"
# linux/seccomp.h, linux/filter.h and the number of socket() on x86-64.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1
SOCKET, AF_UNIX = 41, 1


def forbid_sockets():
    """As a strict container does: no more Unix sockets in this process and those that it starts."""
    steps = [
        (LOAD, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 3, SOCKET),
        (LOAD, 0, 0, 16),
        (JUMP_IF_EQUAL, 0, 1, AF_UNIX),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(text))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    assert prctl(PR_SET_SECCOMP, FILTER, program) == 0, os.strerror(ctypes.get_errno())


def other(queue, answer):
    tensor = queue.get()
    assert torch.equal(tensor.cpu(), pattern(3 * MIB))
    del tensor
    answer.put("got it")


def main():
    assert os.uname().machine == "x86_64", "the numbers above are those of x86-64"
    forbid_sockets()
    tensor = to_gpu(pattern(3 * MIB))
    if os.environ.get("CONCERTINA_CONF") != PLAIN:
        error = str(raises(RuntimeError, lambda: reduce_tensor(tensor)))
        assert "Operation not permitted" in error and f"CONCERTINA_CONF={PLAIN}" in error, error
        os.environ["CONCERTINA_CONF"] = PLAIN
        os.execv(sys.executable, [sys.executable, *sys.argv])
    context = mp.get_context("spawn")
    queue, answer = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=other, args=(queue, answer), daemon=True)
    process.start()
    queue.put(tensor)
    assert answer.get() == "got it"
    process.join(60)
    assert process.exitcode == 0


if __name__ == "__main__":
    main()
