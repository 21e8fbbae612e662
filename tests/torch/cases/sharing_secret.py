# Memory of this process is for those that were given its handle: whoever only knows the socket's name, which
# every process can read, or has the handle of something else, gets nothing and is told nothing. What makes no
# sense, or stops in the middle, does no harm and holds nobody up.
#: attach plain install
import array
import os
import random
import socket
import struct
import time

import torch
import torch.multiprocessing as mp
from case import MIB, pattern, to_gpu
from torch.multiprocessing.reductions import reduce_tensor

# As in sharing/mod.rs: a mark, the process, the number, offset and size, the secret.
HANDLE = struct.Struct("<8s16sQQQ16s")


def names():
    """The sockets of processes that share, as every process can see them."""
    lines = open("/proc/net/unix").read().splitlines()
    return {name[1:] for line in lines if (name := line.split()[-1]).startswith("@concertina-")}


def connect(name):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(20)
    peer.connect("\0" + name)
    return peer


def ask(name, question):
    """What is answered to a question: the bytes, and how many descriptors came with them."""
    with connect(name) as peer:
        try:
            peer.sendall(question)
            answer, ancillary, _, _ = peer.recvmsg(4096, socket.CMSG_SPACE(4 * 64))
        except (BrokenPipeError, ConnectionResetError):
            return b"", 0
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    for file in files:
        os.close(file)
    return answer, len(files)


def handle_of(tensor):
    """The handle that another process would get."""
    _, arguments = reduce_tensor(tensor)
    handles = [it for it in arguments if isinstance(it, bytes) and len(it) == HANDLE.size]
    return next(it for it in handles if it.startswith(b"concert"))


def other(inbox, outbox):
    tensor = inbox.get()
    outbox.put(torch.equal(tensor.cpu(), pattern(3 * MIB)))
    del tensor


def main():
    before = names()
    # Chunks of their own: two spans.
    one, two = to_gpu(pattern(30 * MIB)), to_gpu(pattern(30 * MIB))
    first, second = handle_of(one), handle_of(two)
    (name,) = names() - before

    # Without a handle: numbers, counted up.
    for number in [*range(20), 1 << 63, (1 << 63) + 1, (1 << 64) - 1]:
        for start in 0, 1, (1 << 64) - 1:
            assert ask(name, struct.pack("<QQQQ", number, 0, 0, start)) == (b"", 0), number
            assert ask(name, struct.pack("<QQQ", number, 0, start) + bytes(8)) == (b"", 0), number

    # With one, but for something else, or not quite the same.
    def question(handle, number=None, secret=None):
        parts = HANDLE.unpack(handle)
        number = parts[2] if number is None else number
        return struct.pack("<Q16sQ", number, parts[5] if secret is None else secret, 0)

    for handle in first, second:
        answer, files = ask(name, question(handle))
        assert answer and files > 0
        secret = HANDLE.unpack(handle)[5]
        assert len(set(secret)) > 4, "no secret"
        for bit in range(128):
            wrong = int.from_bytes(secret, "little") ^ 1 << bit
            wrong = wrong.to_bytes(16, "little")
            assert ask(name, question(handle, secret=wrong)) == (b"", 0), bit
    number = HANDLE.unpack(second)[2]
    assert number != HANDLE.unpack(first)[2]
    assert ask(name, question(first, number=number)) == (b"", 0)

    # Noise, of all lengths, with descriptors that nobody wants, and endings in the middle.
    noise = random.Random(1)
    for length in [*range(70), 1000, 100_000]:
        with connect(name) as peer:
            try:
                socket.send_fds(peer, [noise.randbytes(length) or b"x"], [0, 1, 2])
                if length % 3 == 0:
                    peer.shutdown(socket.SHUT_WR)
                if length % 5 == 0:
                    peer.recv(1)
            except (BrokenPipeError, ConnectionResetError):
                pass
    # A great many that say nothing, or one byte now and then.
    silent = [connect(name) for _ in range(100)]
    slow = [connect(name) for _ in range(20)]
    begun = time.monotonic()
    context = mp.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=other, args=(inbox, outbox), daemon=True)
    process.start()
    shared = to_gpu(pattern(3 * MIB))
    inbox.put(shared)
    while outbox.empty():
        assert time.monotonic() - begun < 100, "no answer"
        for peer in slow:
            try:
                peer.send(b"\0")
            except (BrokenPipeError, ConnectionResetError):
                pass
        silent.append(connect(name))
        time.sleep(0.05)
    assert outbox.get() is True
    process.join(60)
    assert process.exitcode == 0
    for peer in silent + slow:
        peer.close()
    answer, files = ask(name, question(first))
    assert answer and files > 0


if __name__ == "__main__":
    main()
    # Two tensors count as sent, and nobody opened them. PyTorch lets go of those in a destructor which may run
    # after what it uses is gone, and then crashes at exit, whatever the allocator.
    os._exit(0)
