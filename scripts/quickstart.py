"""Trains a small model on a GPU under PyTorch's own allocator, then under concertina, each in a
process of its own from the same seed, and prints both side by side. `quickstart.sh` calls it.

    python3 scripts/quickstart.py [--steps N]

Needs PyTorch, an NVIDIA GPU with about 6 GB free, and libconcertina.so where `concertina.library()`
finds it.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MIB = 2**20
STEPS = 40
WORDS = 8192


def probe():
    """Why no model can be trained here, in one line; None if one can."""
    try:
        import torch
    except Exception as error:
        return f"{sys.executable} has no working PyTorch ({type(error).__name__}: {error})"
    if not torch.version.cuda:
        return f"PyTorch {torch.__version__} in {sys.executable} is not built for CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU that it can use"
    return None


def train(allocator, steps):
    """Trains, and prints what came out as one line of JSON."""
    if allocator == "concertina":
        sys.path.insert(0, str(HERE))
        import concertina

        concertina.install()
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self, width=512, layers=8):
            super().__init__()
            layer = nn.TransformerEncoderLayer(
                width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.embed = nn.Embedding(WORDS, width)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.out = nn.Linear(width, WORDS)

        def forward(self, tokens):
            return self.out(self.layers(self.embed(tokens)))

    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    shapes = random.Random(1)
    loss = None
    for step in range(steps):
        if step == 1:
            # The first step is PyTorch's own start-up.
            torch.cuda.synchronize()
            start = time.perf_counter()
        batch, length = shapes.randint(2, 16), shapes.randint(64, 512)
        tokens = torch.randint(0, WORDS, (batch, length), device="cuda")
        # To be learnt: a fixed rule that turns each word into another.
        wanted = (tokens * 5 + 1) % WORDS
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    last = loss.item()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if allocator == "concertina":
        stats = concertina.stats()["devices"][0]["memory_stats"]
    else:
        stats = torch.cuda.memory_stats()
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "loss": last,
                "seconds": seconds,
                "live": stats["allocated_bytes.all.peak"],
                "reserved": stats["reserved_bytes.all.peak"],
            }
        )
    )


def run(allocator, steps, statistics):
    """`train` in a process of its own."""
    environment = dict(os.environ, CONCERTINA_STATS=str(statistics))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    command = [sys.executable, __file__, "--train", allocator, "--steps", str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(
            f"quickstart.py: training under {allocator} failed (exit status {done.returncode}); "
            "what it said stands above"
        )
    return json.loads(lines[-1])


def show(results):
    first = results["PyTorch's own"]
    print(f"\n{first['gpu']}, PyTorch {first['torch']}\n")
    print(
        f"{'allocator':14} {'last loss':>10} {'seconds':>8} {'peak live MiB':>14} "
        f"{'peak reserved':>14} {'ratio':>7}"
    )
    for name, result in results.items():
        live, reserved = result["live"], result["reserved"]
        print(
            f"{name:14} {result['loss']:10.6f} {result['seconds']:8.2f} {live / MIB:14.1f} "
            f"{reserved / MIB:14.1f} {reserved / live:7.4f}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="2 or more")
    parser.add_argument("--probe", action="store_true", help="say what is missing")
    parser.add_argument("--train", choices=["native", "concertina"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: 2 or more")
    if arguments.train:
        train(arguments.train, arguments.steps)
        return
    missing = probe()
    if missing:
        print(" ".join(missing.split()))
        sys.exit(1)
    if arguments.probe:
        return
    print(
        f"Training a small transformer for {arguments.steps} steps of changing shapes, twice …",
        flush=True,
    )
    directory = pathlib.Path(tempfile.mkdtemp(prefix="concertina-"))
    statistics = directory / "stats.json"
    results = {
        "PyTorch's own": run("native", arguments.steps, directory / "unused.json"),
        "concertina": run("concertina", arguments.steps, statistics),
    }
    show(results)
    device = json.loads(statistics.read_text())["devices"][0]
    print(f"\nWhere the memory went, as concertina wrote it at exit: {statistics}")
    for name in ("fragmentation", "live_blocks", "hits", "growths", "stitches"):
        print(f"  {name}: {device[name]}")


if __name__ == "__main__":
    main()
