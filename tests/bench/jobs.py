"""Real PyTorch jobs, run whole under one allocator, in a process of their own.

    python3 tests/bench/jobs.py JOB [--allocator NAME] [--steps N]

prints one JSON line: step times, losses, and the peaks of memory. `compare.py` runs them side by
side. The traces in `tests/traces` were recorded from these jobs.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import time

ALLOCATORS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "concertina": None,
    "recipe": None,
}

DEV = "cuda"

def gpt2_varlen(steps=40):
    from transformers import GPT2Config, GPT2LMHeadModel
    m = GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=1024, n_head=16)).to(DEV)
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4)
    r = random.Random(1)
    for _ in range(steps):
        b, s = r.randint(2, 12), r.randint(64, 1024)
        x = torch.randint(0, 50257, (b, s), device=DEV)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = m(input_ids=x, labels=x).loss
        loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
        yield loss.item()

def llama_lora_ckpt(steps=40):
    from transformers import LlamaConfig, LlamaForCausalLM
    from peft import LoraConfig, get_peft_model
    cfg = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                      num_key_value_heads=4, vocab_size=32000)
    m = LlamaForCausalLM(cfg).to(torch.bfloat16).to(DEV)
    m = get_peft_model(m, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    m.enable_input_require_grads(); m.gradient_checkpointing_enable()
    m.train()
    opt = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-4)
    r = random.Random(2)
    for _ in range(steps):
        b, s = r.randint(1, 8), r.randint(128, 2048)
        x = torch.randint(0, 32000, (b, s), device=DEV)
        loss = m(input_ids=x, labels=x).loss
        loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
        yield loss.item()

def resnet_multiscale(steps=60):
    import torchvision
    m = torchvision.models.resnet50().to(DEV).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = random.Random(3)
    for i in range(steps):
        size = 32 * r.randint(5, 16); b = r.choice([32, 48, 64])
        x = torch.randn(b, 3, size, size, device=DEV).to(memory_format=torch.channels_last)
        y = torch.randint(0, 1000, (b,), device=DEV)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(m(x), y)
        loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
        if i % 10 == 9:
            with torch.no_grad():
                m.eval(); m(torch.randn(100, 3, 256, 256, device=DEV)); m.train()
        yield loss.item()

def llama_serve(steps=14):
    """Batched generation with a growing key/value cache, request sizes varying."""
    from transformers import LlamaConfig, LlamaForCausalLM
    cfg = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                      num_key_value_heads=4, vocab_size=32000)
    m = LlamaForCausalLM(cfg).to(torch.bfloat16).to(DEV).eval()
    r = random.Random(5)
    for _ in range(steps):
        b, s, n = r.randint(1, 32), r.randint(64, 1536), r.randint(16, 48)
        x = torch.randint(0, 32000, (b, s), device=DEV)
        with torch.inference_mode():
            out = m.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        yield float(out.sum() % 1000003)

def prefetch_streams(steps=60):
    """Side-stream input prefetch with record_stream, and a second compute stream."""
    m = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU()) for _ in range(12)]).to(DEV)
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4)
    copy, aux = torch.cuda.Stream(), torch.cuda.Stream(); main = torch.cuda.current_stream(); r = random.Random(7)
    def fetch():
        h = torch.randn(r.randint(512, 8192), 4096).pin_memory()
        with torch.cuda.stream(copy):
            return h.to(DEV, non_blocking=True)
    nxt = fetch()
    for _ in range(steps):
        main.wait_stream(copy); x = nxt; x.record_stream(main); nxt = fetch()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = m(x); loss = y.float().pow(2).mean()
        aux.wait_stream(main)
        with torch.cuda.stream(aux):
            z = (y.detach().float() * 2).sum(); y.record_stream(aux); z.record_stream(aux)
        loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
        yield loss.item()

ALL = [gpt2_varlen, llama_lora_ckpt, resnet_multiscale, llama_serve, prefetch_streams]

def switch(name):
    """Must run before torch is imported: it reads its settings then."""
    conf = ALLOCATORS[name]
    if conf is not None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
        return
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
    import concertina

    if name == "concertina":
        concertina.install()
    else:
        import torch

        memory = torch.cuda.memory
        memory.change_current_allocator(
            memory.CUDAPluggableAllocator(
                concertina.library(), "concertina_malloc", "concertina_free"
            )
        )


def memory_stats(name):
    if ALLOCATORS[name] is not None:
        return torch.cuda.memory_stats()
    import concertina

    device = concertina.stats()["devices"][0]
    return device["memory_stats"] | {"ours": {k: v for k, v in device.items() if k != "memory_stats"}}


def so_far(stats):
    """Blocks that were ever handed out, and seconds that concertina has spent in calls of the driver."""
    calls = stats.get("ours", {}).get("driver_calls", {})
    return stats["allocation.all.allocated"], sum(it["nanoseconds"] for it in calls.values()) / 1e9


def main():
    global torch, F
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("job", choices=[job.__name__ for job in ALL])
    p.add_argument("--allocator", choices=ALLOCATORS, default="native")
    p.add_argument("--steps", type=int)
    p.add_argument("--limit", type=float, help="MiB that the allocator may hold")
    p.add_argument(
        "--turns", action="store_true", help="wait for a line of input before each step, print its time"
    )
    a = p.parse_args()
    if a.limit:
        os.environ["CONCERTINA_CONF"] = f"limit:{int(a.limit)}MiB"
    switch(a.allocator)
    import torch
    import torch.nn.functional as F

    if a.limit and ALLOCATORS[a.allocator] is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(a.limit * 2**20 / total)
    job = {job.__name__: job for job in ALL}[a.job]
    torch.manual_seed(0)
    times, losses = [], []
    work = job(a.steps) if a.steps else job()
    while True:
        if a.turns:
            sys.stdin.readline()
        start = time.perf_counter()
        loss = next(work, None)
        if loss is None:
            break
        losses.append(loss)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            began = so_far(memory_stats(a.allocator))
        if a.turns:
            print(f"step {times[-1]:.9f}", flush=True)
    stats = memory_stats(a.allocator)
    blocks, in_driver = (now - then for now, then in zip(so_far(stats), began))
    free, total = torch.cuda.mem_get_info()
    print(
        json.dumps(
            {
                "job": a.job,
                "allocator": a.allocator,
                "steps": len(times),
                "total_s": round(sum(times), 3),
                "first_s": round(times[0], 3),
                "step_ms_median": round(1e3 * statistics.median(times[1:]), 2),
                "step_ms": [round(1e3 * it, 3) for it in times],
                "losses": losses,
                # In all steps but the first.
                "blocks": blocks,
                "in_driver_s": round(in_driver, 6) if "ours" in stats else None,
                "peak_live_mib": stats["allocated_bytes.all.peak"] / 2**20,
                "peak_reserved_mib": stats["reserved_bytes.all.peak"] / 2**20,
                "device_used_mib": (total - free) / 2**20,
                "ours": stats.get("ours"),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
