# A model is trained: forward, backward, an optimiser with state; memory is level from step to step.
import torch
from case import counter

model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 16)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
levels = []
for step in range(4):
    batch = torch.randn(64, 256).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del loss, batch
    torch.cuda.synchronize()
    levels.append(counter("allocated_bytes.all.current"))
assert levels[1] == levels[2] == levels[3], levels
