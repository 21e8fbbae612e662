# cudaIpcGetMemHandle of tensors, as libraries beside PyTorch use it (vLLM's and SGLang's all-reduce among GPUs,
# NCCL's registered buffers): a handle and the distance from the allocation's start, also for what a graph has
# used and freed, opened on the same GPU and on another.
#: core
#: attach run native
#: devices 2
#: env STANDIN_PEERS=1
import ctypes
import os

import torch
import torch.multiprocessing as mp
from case import (
    ATTACH,
    GPU,
    MIB,
    address_range,
    attribute,
    base_allocation,
    cuda_runtime,
    ipc_close,
    ipc_handle,
    ipc_open,
    pattern,
    read,
    to_gpu,
    write,
)

# Of CUpointer_attribute in cuda.h.
IS_LEGACY_CUDA_IPC_CAPABLE, RANGE_START_ADDR, RANGE_SIZE, MEMPOOL_HANDLE = 10, 11, 12, 17
INVALID_VALUE = 1
# Where a process opens its own, CUDA itself has answered with either.
INVALID_CONTEXT = 201


def shared(address):
    """What vLLM sends: the handle of the allocation's start, and how far from it the memory is."""
    start = attribute(address, RANGE_START_ADDR)
    assert start <= address < start + attribute(address, RANGE_SIZE)
    assert address_range(address) == (start, attribute(address, RANGE_SIZE))
    assert attribute(address, IS_LEGACY_CUDA_IPC_CAPABLE) & 1 == 1
    status, handle = ipc_handle(start)
    assert status == 0, status
    # A handle is of the whole allocation, whichever address in it is named.
    assert ipc_handle(address) == (0, handle)
    assert ipc_handle(address + 1) == (0, handle)
    return handle, address - start


def other(device, inbox, outbox):
    torch.cuda.set_device(device)
    # Some memory of its own, which uses the pool.
    own = to_gpu(pattern(1000, 5))
    opened = []
    while (order := inbox.get()) != "end":
        match order:
            case "open", handle, offset, size:
                status, start = ipc_open(handle)
                assert status == 0, status
                opened.append(start)
                outbox.put((start, read(start + offset, size)))
            case "refused", handle:
                outbox.put(ipc_open(handle)[0])
            case "read", start, size:
                outbox.put(read(start, size))
            case "write", start, host:
                write(start, host)
                outbox.put("written")
            case "close", start:
                outbox.put(ipc_close(start))
            case "export", size:
                own = to_gpu(pattern(size, 8))
                outbox.put(shared(own.data_ptr()))
    assert torch.equal(own.cpu(), pattern(own.numel(), 8 if own.numel() > 1000 else 5))


class Other:
    def __init__(self, device):
        context = mp.get_context("spawn")
        self.inbox, self.outbox = context.SimpleQueue(), context.SimpleQueue()
        arguments = (device, self.inbox, self.outbox)
        self.process = context.Process(target=other, args=arguments, daemon=True)
        self.process.start()

    def ask(self, *order):
        self.inbox.put(order)
        return self.outbox.get()

    def end(self):
        self.inbox.put("end")
        self.process.join(60)
        assert self.process.exitcode == 0


def tensors(peer):
    """Small and large ones, side by side, from their start and from the middle."""
    sizes = [1000, 1, 3 * MIB, 50 * MIB + 513, 700]
    kept = [to_gpu(pattern(size, seed)) for seed, size in enumerate(sizes)]
    for seed, tensor in enumerate(kept):
        handle, offset = shared(tensor.data_ptr())
        start, seen = peer.ask("open", handle, offset, tensor.numel())
        assert torch.equal(seen, pattern(tensor.numel(), seed)), seed
        if ATTACH != "native":
            # Libraries ask PyTorch, or CUDA.
            assert base_allocation(tensor.data_ptr())[0] == tensor.data_ptr() - offset
        assert peer.ask("write", start + offset, pattern(tensor.numel(), 100 + seed)) == "written"
        assert torch.equal(tensor.cpu(), pattern(tensor.numel(), 100 + seed)), seed
        if tensor.numel() > 1000:
            inner = shared(tensor.data_ptr() + 777)
            assert inner == (handle, offset + 777)
        assert peer.ask("close", start) == 0
    assert all(torch.equal(it.cpu(), pattern(it.numel(), 100 + at)) for at, it in enumerate(kept))


def opened_twice(peer):
    """The same handle is opened at one address, and closed as often; in any order."""
    one, two = to_gpu(pattern(5 * MIB, 1)), to_gpu(pattern(30 * MIB, 2))
    (first, at), (second, to) = shared(one.data_ptr()), shared(two.data_ptr())
    a, _ = peer.ask("open", first, at, 1)
    b, _ = peer.ask("open", second, to, 1)
    assert peer.ask("open", first, at, 1)[0] == a
    assert peer.ask("close", a) == 0
    assert torch.equal(peer.ask("read", a + at, one.numel()), pattern(5 * MIB, 1))
    assert peer.ask("close", b) == 0
    assert torch.equal(peer.ask("read", a + at, one.numel()), pattern(5 * MIB, 1))
    assert peer.ask("close", a) == 0
    assert peer.ask("close", a) != 0
    # Once more, after it was closed for good.
    again, seen = peer.ask("open", second, to, two.numel())
    assert torch.equal(seen, pattern(30 * MIB, 2))
    # What another process shares cannot be passed on; and no process opens its own.
    assert ipc_open(first)[0] in (INVALID_VALUE, INVALID_CONTEXT)
    assert peer.ask("close", again) == 0


def changed(peer):
    """A handle that did not come as it was made opens nothing: another memory, another place, no secret."""
    tensor = to_gpu(pattern(3 * MIB, 1))
    handle, offset = shared(tensor.data_ptr())
    start, _ = peer.ask("open", handle, offset, tensor.numel())
    # By sharing/mod.rs: a mark of 8 bytes, the process's 16, then number, offset, size and secret. A little
    # further off may still lie in what is shared.
    for at in (8, 23, 24, 31, 39, 47, 48, 56, 63):
        wrong = bytearray(handle)
        wrong[at] ^= 0x80
        status = peer.ask("refused", bytes(wrong))
        assert status == INVALID_VALUE, (at, status)
    assert peer.ask("close", start) == 0


def of_a_graph(peer):
    """What was allocated in a capture, freed there or not, stays where the graph uses it: the others see
    what each replay leaves."""
    source = to_gpu(pattern(9 * MIB, 0))
    large = to_gpu(pattern(40 * MIB, 1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    addresses = []
    with torch.cuda.graph(graph):
        freed = torch.empty_like(source)
        freed.copy_(source)
        kept = torch.empty_like(source)
        kept.copy_(freed)
        also_freed = torch.empty_like(large)
        also_freed.copy_(large)
        addresses += [(it.data_ptr(), it.numel()) for it in (freed, kept, also_freed)]
        del freed, also_freed
    sent = [(*shared(address), size) for address, size in addresses]
    starts = []
    for seed in 3, 4:
        write(source.data_ptr(), pattern(9 * MIB, seed))
        write(large.data_ptr(), pattern(40 * MIB, seed))
        graph.replay()
        torch.cuda.synchronize()
        for handle, offset, size in sent:
            start, seen = peer.ask("open", handle, offset, size)
            starts.append(start)
            assert torch.equal(seen, pattern(size, seed)), size
    # Others come and go meanwhile.
    more = [to_gpu(pattern(20 * MIB, seed)) for seed in range(8)]
    del more
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    for (handle, offset, size), start in zip(sent, starts):
        assert torch.equal(peer.ask("read", start + offset, size), pattern(size, 4))
    for start in starts:
        assert peer.ask("close", start) == 0
    assert torch.equal(kept.cpu(), pattern(9 * MIB, 4))
    if ATTACH != "native":
        assert base_allocation(kept.data_ptr()) == address_range(kept.data_ptr())


def in_order():
    """CUDA shares no memory that is allocated in the order of a stream, and PyTorch's is none."""
    runtime = cuda_runtime()
    mine, address = torch.cuda.current_stream().cuda_stream, ctypes.c_void_p()
    tensor = to_gpu(pattern(1000))
    allocated = runtime.cudaMallocAsync(
        ctypes.byref(address), ctypes.c_size_t(MIB), ctypes.c_void_p(mine)
    )
    assert allocated == 0
    assert ipc_handle(address.value)[0] == INVALID_VALUE
    assert attribute(address.value, IS_LEGACY_CUDA_IPC_CAPABLE) & 1 == 0
    assert attribute(address.value, MEMPOOL_HANDLE) != 0
    assert attribute(tensor.data_ptr(), MEMPOOL_HANDLE) == 0
    assert runtime.cudaFreeAsync(address, ctypes.c_void_p(mine)) == 0
    # A tensor may have its memory next.
    tensors = [to_gpu(pattern(MIB)) for _ in range(4)]
    for tensor in tensors:
        shared(tensor.data_ptr())
    # Nor what is nobody's.
    host = pattern(10)
    assert ipc_handle(host.data_ptr())[0] == INVALID_VALUE


def freed_while_open(peer):
    """Nothing is promised about what it holds then, but that nobody is the worse for it."""
    tensor = to_gpu(pattern(30 * MIB, 6))
    handle, offset = shared(tensor.data_ptr())
    start, seen = peer.ask("open", handle, offset, tensor.numel())
    assert torch.equal(seen, pattern(30 * MIB, 6))
    del tensor
    torch.cuda.empty_cache()
    assert torch.equal(peer.ask("read", start + offset, 30 * MIB), pattern(30 * MIB, 6))
    assert peer.ask("close", start) == 0


def exporter_ends():
    """What is open stays."""
    giver = Other(0)
    handle, offset = giver.ask("export", 7 * MIB)
    status, start = ipc_open(handle)
    assert status == 0
    giver.end()
    assert torch.equal(read(start + offset, 7 * MIB), pattern(7 * MIB, 8))
    assert ipc_close(start) == 0
    assert ipc_open(handle)[0] != 0


def forked():
    """A child has no part in it, as it has none in CUDA."""
    tensor = to_gpu(pattern(1000))
    if (child := os.fork()) == 0:
        os._exit(ipc_handle(tensor.data_ptr())[0] == 0)
    assert os.waitpid(child, 0)[1] == 0


def main():
    for device in range(2):
        peer = Other(device)
        tensors(peer)
        opened_twice(peer)
        of_a_graph(peer)
        if ATTACH != "native":
            freed_while_open(peer)
            changed(peer)
        peer.end()
    in_order()
    exporter_ends()
    if not GPU:
        forked()


if __name__ == "__main__":
    main()
