# What stands beside the allocator works as ever: PyTorch's tool for snapshots by its own command, the
# figures of pinned memory, what the device has free, the processes on it; and backward on several threads
# allocates and frees where autograd's threads run.
import subprocess
import sys
import threading

import torch
from case import GPU, MIB, counter, pattern

torch.cuda.memory._record_memory_history()


def kept_here():
    return torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")


kept = kept_here()
gone = torch.empty(7 * MIB, dtype=torch.uint8, device="cuda")
del gone
torch.cuda.memory._dump_snapshot("snapshot.pickle")
torch.cuda.memory._record_memory_history(None)
tool = torch.cuda._memory_viz.__file__
for command in "trace_plot", "segment_plot", "stats", "trace":
    output = ["-o", f"{command}.html"] if command.endswith("_plot") else []
    done = subprocess.run(
        [sys.executable, tool, command, "snapshot.pickle", *output],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (command, done.stderr[-300:])
    text = open(output[1]).read() if output else done.stdout
    assert text.strip(), command
    # The plots carry the snapshot inside.
    assert not output or ("<script" in text and len(text) > 10_000), command

free, total = torch.cuda.mem_get_info()
assert 0 < free <= total - torch.cuda.memory_reserved()
more = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
assert free - torch.cuda.mem_get_info()[0] >= 48 * MIB or GPU
del more
torch.cuda.empty_cache()

pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
if hasattr(torch.cuda, "host_memory_stats"):
    stats = torch.cuda.host_memory_stats()
    assert stats["allocated_bytes.current"] >= 3 * MIB, stats
    assert stats["num_host_alloc"] >= 1
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_accumulated_host_memory_stats()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == 0
assert isinstance(torch.cuda.list_gpu_processes(), str)


class Passed(torch.autograd.Function):
    """Copies forward and backward, in memory of its own."""

    @staticmethod
    def forward(context, tensor):
        context.save_for_backward(tensor.clone())
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        threads.add(threading.get_ident())
        context.saved_tensors[0].clone()
        return gradient.clone()


threads, wrong = set(), []


def work(number):
    try:
        values, slopes = torch.rand((2, MIB // 4), generator=torch.Generator().manual_seed(number))
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                leaf = values.cuda().requires_grad_()
                result = leaf
                for _ in range(4):
                    result = Passed.apply(result)
                result.backward(slopes.cuda())
                if not torch.equal(leaf.grad.cpu(), slopes):
                    wrong.append(number)
    except Exception as error:
        wrong.append(error)


workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert not wrong, wrong
assert threads and not threads & {worker.ident for worker in workers}
del kept
assert counter("allocated_bytes.all.current") == 0
