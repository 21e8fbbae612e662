# Several streams that pass tensors on with events, and `record_stream`, while memory is scarce and
# the GPU is behind: no byte is another's.
#: core
#: memory 128
#: env STANDIN_PACE=random:7
import torch
from case import MIB, pattern

streams = [torch.cuda.Stream() for _ in range(4)]
hosts = [pattern(4 * MIB, seed) for seed in range(4)]
locked = [host.pin_memory() for host in hosts]
results = []
for around in range(24):
    number = around % 4
    maker, user = streams[number], streams[(number + 1) % 4]
    with torch.cuda.stream(maker):
        made = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        made.copy_(locked[number], non_blocking=True)
    user.wait_stream(maker)
    with torch.cuda.stream(user):
        back = torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True)
        copy = made.clone()
        back.copy_(copy, non_blocking=True)
        made.record_stream(user)
    del made, copy
    results.append((number, back))
torch.cuda.synchronize()
for number, back in results:
    assert torch.equal(back, hosts[number]), number
