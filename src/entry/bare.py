"""Run once inside a Python process under `concertina run`, when it first uses the GPU.

`functions` is put here by whoever runs this: addresses of the library's functions, by name.
"""

import ctypes
import sys

# What `concertina run` has Python do at its start imports this module.
if "torch" in sys.modules and "concertina" not in sys.modules:
    ctypes.CFUNCTYPE(None)(functions["say_bare"])()
