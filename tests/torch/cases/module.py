# The Python module: the statistics in the program and in a file, and installing twice.
#: core
#: attach install
import json

import concertina
import torch

concertina.install()
tensor = torch.empty(1000, device="cuda")
stats = concertina.stats()
assert stats["schema_version"] == 1 and stats["driver"] == "cuda"
assert stats["devices"][0]["memory_stats"]["allocated_bytes.all.current"] == 4096
concertina.dump_stats("now.json")
with open("now.json") as file:
    assert json.load(file)["devices"][0]["live_blocks"] == 1
