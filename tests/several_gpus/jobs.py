"""Jobs for two GPUs over NCCL, each under one allocator.

    torchrun --nproc-per-node 2 tests/several_gpus/jobs.py JOB [--install]

prints one JSON line from rank 0; `run.py` runs them under several allocators and compares. `--install` makes
concertina PyTorch's allocator by `concertina.install()`; under `concertina run` nothing is needed.
"""
import argparse
import ctypes
import functools
import json
import os
import random
import statistics
import sys
import time

MIB = 1 << 20


def llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def train(model, optimizer, steps, backward=None):
    """Steps over batches of varied lengths: the median time of a step, and the losses."""
    lengths, times, losses = random.Random(5), [], []
    for _ in range(steps):
        shape = (lengths.randint(1, 6), 64 * lengths.randint(2, 24))
        x = torch.randint(0, 32000, shape, device=DEV)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=x, labels=x).loss
        backward(loss) if backward else loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "step_ms": round(1e3 * statistics.median(times[3:]), 1),
        "losses": round(sum(losses), 4),
        "loss_last": losses[-1],
    }


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def ddp():
    model = torch.nn.parallel.DistributedDataParallel(llama(8).to(DEV), gradient_as_bucket_view=True)
    return train(model, adam(model), 20)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FullyShardedDataParallel(
        llama(12).to(DEV), auto_wrap_policy=wrap, device_id=RANK, use_orig_params=True
    )
    return train(model, adam(model), 20)


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = llama(12).to(DEV)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return train(model, adam(model), 20)


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (2,))

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(4096, 16384, bias=False)
            self.down = torch.nn.Linear(16384, 4096, bias=False)

        def forward(self, x):
            return self.down(torch.nn.functional.gelu(self.up(x)))

    model = torch.nn.Sequential(*[Block() for _ in range(6)]).to(DEV).to(torch.bfloat16)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for step in range(30):
        torch.manual_seed(step)
        x = torch.randn(64 * (1 + step % 7), 4096, device=DEV, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        times.append(time.perf_counter() - start)
    return {"step_ms": round(1e3 * statistics.median(times[3:]), 2), "loss_last": last}


def pipeline():
    """1F1B by hand, the receives posted before the sends that they wait for."""
    torch.manual_seed(RANK)
    stage = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).to(DEV)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
    times, total = [], 0.0
    for step in range(20):
        rows = 256 * (1 + step % 5)
        torch.cuda.synchronize()
        start = time.perf_counter()
        count = 8
        if RANK == 0:
            grads = [torch.empty(rows, 2048, device=DEV) for _ in range(count)]
            waits = []
            outs = []
            for i in range(count):
                torch.manual_seed(100 * step + i)
                out = stage(torch.randn(rows, 2048, device=DEV))
                work = [dist.P2POp(dist.irecv, grads[i], 1), dist.P2POp(dist.isend, out.detach(), 1)]
                waits.append(dist.batch_isend_irecv(work))
                outs.append(out)
                if i > 0:
                    [it.wait() for it in waits[i - 1]]
                    outs[i - 1].backward(grads[i - 1])
            [it.wait() for it in waits[-1]]
            outs[-1].backward(grads[-1])
        else:
            for i in range(count):
                x = torch.empty(rows, 2048, device=DEV)
                receive = torch.empty_like(x)
                # The gradient goes back in the same batch in which the next input comes.
                work = [dist.P2POp(dist.irecv, x, 0)]
                grad = torch.zeros_like(x) if i == 0 else grad
                work.append(dist.P2POp(dist.isend, grad, 0))
                [it.wait() for it in dist.batch_isend_irecv(work)]
                x.requires_grad_(True)
                loss = stage(x).pow(2).mean()
                loss.backward()
                total += loss.item()
                grad = x.grad
                del receive
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    shared = torch.tensor([total], device=DEV, dtype=torch.float64)
    dist.all_reduce(shared)
    return {"step_ms": round(1e3 * statistics.median(times[3:]), 2), "losses": round(shared.item(), 6)}


def all_to_all():
    """Expert parallel: as many tokens for each rank as the step says, another number at each step."""
    times, total = [], 0.0
    sizes = random.Random(3)
    experts = torch.nn.Linear(2048, 2048).to(DEV).to(torch.bfloat16)
    for step in range(60):
        table = [[sizes.randint(1, 6000) for _ in range(2)] for _ in range(2)]
        send, receive = table[RANK], [table[0][RANK], table[1][RANK]]
        torch.manual_seed(step)
        x = torch.full((sum(send), 2048), float(RANK + 1), device=DEV, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        got = torch.empty(sum(receive), 2048, device=DEV, dtype=torch.bfloat16)
        dist.all_to_all_single(got, x, receive, send)
        assert (got[: receive[0]] == 1).all() and (got[receive[0] :] == 2).all()
        back = torch.empty_like(x)
        dist.all_to_all_single(back, experts(got), send, receive)
        total += back.float().mean().item()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"step_ms": round(1e3 * statistics.median(times[3:]), 2)}


def graph():
    """An all-reduce captured beside computation, replayed with new memory between the replays."""
    x = torch.ones(1 << 22, device=DEV)
    for _ in range(3):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    x.fill_(1)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    start = time.perf_counter()
    for step in range(50):
        churn = torch.empty(MIB * (1 + step), device=DEV)
        captured.replay()
        del churn
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    right = bool((z == 5).all())
    # NCCL's communicator waits for its graphs to end.
    del captured, y, z
    return {"replay_ms": round(20 * took, 3), "right": right}


def send_receive():
    """Both ways at once, 4 KiB to 1 GiB."""
    times = {}
    for power in range(10, 29, 2):
        count = 1 << power
        taken = []
        for turn in range(5):
            x = torch.full((count,), float(turn + RANK), device=DEV)
            y = torch.empty_like(x)
            torch.cuda.synchronize()
            start = time.perf_counter()
            work = [dist.P2POp(dist.irecv, y, 1 - RANK), dist.P2POp(dist.isend, x, 1 - RANK)]
            [it.wait() for it in dist.batch_isend_irecv(work)]
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
            assert (y == turn + 1 - RANK).all()
        times[f"{4 * count >> 10} KiB"] = round(1e6 * min(taken))
    return {"microseconds": times, "right": True}


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = llama(6)
    model, optimizer = accelerator.prepare(model, adam(model))
    return train(model, optimizer, 15, accelerator.backward)


def with_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)])
            self.losses = []

        def training_step(self, batch, at):
            loss = self.net(batch).pow(2).mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader([torch.randn(2048) for _ in range(2048)], batch_size=64)
    trainer = lightning.Trainer(
        max_epochs=2, devices=2, accelerator="gpu", strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    module = Module()
    start = time.perf_counter()
    trainer.fit(module, data)
    took = time.perf_counter() - start
    return {"step_ms": round(1e3 * took / 32, 2), "loss_last": module.losses[-1].item()}


class Foreign:
    """Memory of the driver's own cudaMalloc as a tensor's."""

    def __init__(self, count):
        self.runtime = runtime()
        address = ctypes.c_void_p()
        assert self.runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4 * count)) == 0
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f4", "data": (address.value, False), "version": 3,
        }

    def free(self):
        assert self.runtime.cudaFree(self.address) == 0


def runtime():
    maps = open("/proc/self/maps").read().split()
    return ctypes.CDLL(next(it for it in maps if "libcudart.so" in it))


def bandwidth():
    """Collectives on the allocator's memory and on cudaMalloc's, in turns. Under `concertina run` both are the
    pool's: this is for `--install` and for PyTorch's own allocators."""

    def collectives(whole, half, other):
        yield "all_reduce", lambda: dist.all_reduce(whole)
        yield "all_gather", lambda: dist.all_gather_into_tensor(whole, half)
        yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(half, whole)
        yield "all_to_all", lambda: dist.all_to_all_single(other, whole)

        def exchange():
            work = [dist.P2POp(dist.irecv, other, 1 - RANK), dist.P2POp(dist.isend, whole, 1 - RANK)]
            [it.wait() for it in dist.batch_isend_irecv(work)]

        yield "send_receive", exchange

    rows = {}
    for power in (20, 22, 24, 26, 28, 30, 32):
        count = (1 << power) // 4
        own = [torch.ones(it, device=DEV) for it in (count, count // 2, count)]
        memory = [Foreign(it) for it in (count, count // 2, count)]
        foreign = [torch.as_tensor(it, device=DEV) for it in memory]
        assert [a.data_ptr() for a in foreign] == [it.address.value for it in memory]
        [it.fill_(1) for it in foreign]
        loops = max(3, min(40, (1 << 31) >> power))
        for (name, ours), (_, bare) in zip(collectives(*own), collectives(*foreign)):
            taken = [[], []]
            for turn in range(9):
                for which, call in enumerate((ours, bare) if turn % 2 else (bare, ours)):
                    which = which if turn % 2 else 1 - which
                    call()
                    dist.barrier()
                    torch.cuda.synchronize()
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(loops):
                        call()
                    end.record()
                    end.synchronize()
                    taken[which].append(begin.elapsed_time(end) / loops)
            ours_ms, bare_ms = (statistics.median(it) for it in taken)
            ratios = sorted(b / a for a, b in zip(*taken))
            rows[f"{name} {1 << power >> 20} MiB"] = [
                round((1 << power) / ours_ms / 1e6, 1), round((1 << power) / bare_ms / 1e6, 1),
                round(ratios[len(ratios) // 2], 4),
            ]
        del own, foreign, ours, bare
        torch.cuda.synchronize()
        [it.free() for it in memory]
        torch.cuda.empty_cache()
    return {"GBps_own_cudaMalloc_ratio": rows}


def open_handle(handle):
    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 64)]

    opened, address = Handle(), ctypes.c_void_p()
    ctypes.memmove(ctypes.byref(opened), handle, 64)
    function = runtime().cudaIpcOpenMemHandle
    function.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    status = function(ctypes.byref(address), opened, 1)
    return status, address.value


def raw_ipc():
    """What a custom all-reduce does: buffers exchanged by cudaIpcGetMemHandle at the start, opened by each peer,
    read by kernels, captured in graphs, with memory coming and going meanwhile."""
    result = {}
    for mib in (8, 64, 256):
        mine = torch.zeros(mib * MIB // 4, device=DEV)
        handle = (ctypes.c_char * 64)()
        status = runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(mine.data_ptr()))
        peers = [None, None]
        dist.all_gather_object(peers, (status, bytes(handle), mine.data_ptr()))
        if any(it[0] for it in peers):
            return {"get": [it[0] for it in peers]}
        status, address = open_handle(peers[1 - RANK][1])
        if status:
            return {"open": status}

        out = torch.empty_like(mine)
        copy = runtime().cudaMemcpyAsync
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

        def fetch():
            stream = torch.cuda.current_stream().cuda_stream
            assert copy(out.data_ptr(), address, mib * MIB, 4, stream) == 0

        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            fetch()
            total = out + mine
        for turn in range(10):
            mine.fill_(RANK + 1 + turn)
            churn = [torch.empty(MIB * (1 + turn), device=DEV) for _ in range(4)]
            torch.cuda.synchronize()
            dist.barrier()
            captured.replay()
            torch.cuda.synchronize()
            assert (total == 3 + 2 * turn).all(), (turn, total[0].item())
            dist.barrier()
            del churn
        close = runtime().cudaIpcCloseMemHandle
        close.argtypes = [ctypes.c_void_p]
        assert close(address) == 0
        del captured, out, total
        dist.barrier()
        del mine
    return {"right": True}


def symmetric():
    import torch.distributed._symmetric_memory as symm

    name = dist.group.WORLD.group_name
    t = symm.empty(1 << 20, dtype=torch.float32, device=DEV)
    h = symm.rendezvous(t, name)
    t.fill_(RANK + 1)
    h.barrier()
    other = h.get_buffer(1 - RANK, t.shape, t.dtype)[5].item()
    h.barrier()
    torch.ops.symm_mem.two_shot_all_reduce_(t, "sum", name)
    torch.cuda.synchronize()
    right = other == 2 - RANK and t[9].item() == 3
    # A tensor of a pool of its own allocator.
    result = {"right": right}
    if hasattr(symm, "get_mem_pool"):
        pool = symm.get_mem_pool(torch.device(DEV))
        with torch.cuda.use_mem_pool(pool):
            u = torch.ones(1 << 20, device=DEV)
        h = symm.rendezvous(u, name)
        torch.ops.symm_mem.two_shot_all_reduce_(u, "sum", name)
        torch.cuda.synchronize()
        result["pool"] = bool((u == 2).all())
    return result


def nccl_pool():
    """User buffers: a pool of NCCL's own allocator, registered."""
    backend = dist.group.WORLD._get_backend(torch.device(DEV))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(1 << 24, device=DEV)
    backend.register_mem_pool(pool)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    right = bool((x == 2).all())
    with torch.cuda.use_mem_pool(pool):
        y = torch.ones(1 << 26, device=DEV)
    dist.all_reduce(y)
    torch.cuda.synchronize()
    right = right and bool((y == 2).all())
    backend.deregister_mem_pool(pool)
    del x, y, pool
    return {"right": right}


def register_hook():
    """TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1, which `run.py` sets: NCCL registers each segment."""
    total = 0.0
    for step in range(20):
        x = torch.ones(MIB * (1 + 7 * step), device=DEV)
        dist.all_reduce(x)
        total += x[-1].item()
        if step % 5 == 4:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return {"right": total == 40}


def receive_tensor(queue, done, install):
    if install:
        import concertina

        concertina.install()
    import torch

    torch.cuda.init()
    while queue.empty():
        time.sleep(0.001)
    for _ in range(3):
        while queue.empty():
            time.sleep(0.0001)
        start = time.perf_counter()
        x = queue.get()
        took = time.perf_counter() - start
        value = float(x[-1].item())
        del x
        done.put((value, took))


def shared_tensors():
    """torch.multiprocessing with 10 GiB: what it takes to hand a tensor over."""
    if RANK != 0:
        return {}
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    child = context.Process(target=receive_tensor, args=(queue, done, options.install))
    small = [torch.full((100 << 20,), float(it), dtype=torch.uint8, device=DEV) for it in range(50)]
    del small[::2]
    x = torch.full((10 << 30,), 7, dtype=torch.uint8, device=DEV)
    torch.cuda.synchronize()
    child.start()
    took, opened = [], []
    for _ in range(3):
        start = time.perf_counter()
        torch.multiprocessing.reductions.reduce_tensor(x)
        took.append(time.perf_counter() - start)
        queue.put(x)
        value, theirs = done.get(timeout=120)
        opened.append(theirs)
        assert value == 7
    child.join()
    return {
        "export_ms": [round(1e3 * it, 2) for it in took],
        "open_ms": [round(1e3 * it, 2) for it in opened],
        "right": True,
    }


def communicator_when_full():
    """A communicator made while the pool holds all of the device but some MiB, nearly all of it free."""
    held = []
    for mib in (4096, 256, 16, 2):
        while True:
            try:
                held.append(torch.empty(mib * MIB, dtype=torch.uint8, device=DEV))
            except torch.OutOfMemoryError:
                break
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    del held[8:]
    group = dist.new_group([0, 1])
    y = torch.ones(1 << 22, device=DEV)
    dist.all_reduce(y, group=group)
    torch.cuda.synchronize()
    right = bool((y == 2).all())
    return {"reserved_mib_before": reserved >> 20, "free_mib_before": free >> 20, "right": right}


JOBS = {
    job.__name__: job
    for job in (
        ddp, fsdp1, fsdp2, tensor_parallel, pipeline, all_to_all, graph, send_receive, with_accelerate,
        with_lightning, bandwidth, raw_ipc, symmetric, nccl_pool, register_hook, shared_tensors,
        communicator_when_full,
    )
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--install", action="store_true", help="concertina.install() before CUDA is used")
    options = parser.parse_args()
    if options.install:
        import concertina

        concertina.install()
    import torch
    import torch.distributed as dist

    RANK = int(os.environ["RANK"])
    DEV = f"cuda:{RANK}"
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device(DEV))
    torch.manual_seed(0)
    result = {"job": options.job, **JOBS[options.job]()}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    result["live_mib"] = stats.get("allocated_bytes.all.peak", 0) >> 20
    result["reserved_mib"] = stats.get("reserved_bytes.all.peak", 0) >> 20
    result["device_used_mib"] = (total - free) >> 20
    dist.barrier()
    torch.cuda.synchronize()
    if RANK == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
