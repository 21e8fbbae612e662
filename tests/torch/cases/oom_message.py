# The message of an out-of-memory error: what was asked, what is in use, held, free on the device and
# in the largest range, and advice that fits the state.
#: core
#: memory 512
import re

import torch
from case import MIB, raises


def ask(size):
    error = raises(torch.OutOfMemoryError, lambda: empty(size))
    text = str(error)
    assert text.startswith("CUDA out of memory. Tried to allocate "), text
    assert "\n" not in text.split("\nException raised")[0], text
    return text


def empty(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def amount(text, of):
    number, unit = re.search(rf"{of}:? (\d+(?:\.\d+)?) (\w+)", text).groups()
    return float(number) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


total = torch.cuda.mem_get_info()[1]
kept = empty(100)
text = ask(2 * total // MIB)
assert abs(amount(text, "Tried to allocate") - 2 * total) <= 0.01 * total, text
assert amount(text, "In use by the program") == 100 * MIB, text
assert amount(text, "held by the allocator") == torch.cuda.memory_reserved(), text
assert amount(text, "GPU 0 has a total capacity of") > amount(text, "of which") > 0, text
assert "largest free range: " in text, text
assert "needs more than there is" in text, text

# A limit stands in the way.
torch.cuda.set_per_process_memory_fraction(0.5)
text = ask(total // MIB * 6 // 10)
assert "limit" in text.partition("; limit: ")[2], text
torch.cuda.set_per_process_memory_fraction(1.0)
assert "; limit: " not in ask(2 * total // MIB)
assert "Tried to allocate more than 1EB memory." in ask(1 << 41)
