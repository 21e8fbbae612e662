"""Run once inside a Python process under `concertina run`, when it first uses the GPU: whether PyTorch is attached.

`functions` holds addresses of the library's functions, by name.
"""

import ctypes
import sys

# The start-up file of `concertina run` imports the module `concertina`.
if "torch" in sys.modules and "concertina" not in sys.modules:
    ctypes.CFUNCTYPE(None)(functions["not_attached"])()
