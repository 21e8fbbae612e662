# A program that ends in the middle, by `os._exit`, leaves its statistics.
#: ends 3
import os

import torch

tensor = torch.empty(1000, device="cuda")
os._exit(3)
