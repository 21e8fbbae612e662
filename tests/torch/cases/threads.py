# Threads on streams of their own allocate at the same time.
import threading

import torch
from case import MIB, counter, pattern

wrong = []


def work(seed):
    try:
        host = pattern(MIB + seed, seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                there = host.to("cuda")
                if not torch.equal((there.clone()).cpu(), host):
                    wrong.append(seed)
    except Exception as error:
        wrong.append(error)


torch.empty(1, device="cuda")
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
assert counter("allocated_bytes.all.current") == 0
