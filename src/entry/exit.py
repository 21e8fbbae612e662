"""Run once inside a Python process that uses the library and wants statistics.

`functions` holds addresses of the library's functions, by name. os._exit
skips everything that runs at a normal exit, so the statistics are written before it is called.
"""

import ctypes
import os
import sys

write_statistics = ctypes.CFUNCTYPE(None)(functions["write_statistics"])
real_exit = os._exit


def _exit(status):
    write_statistics()
    real_exit(status)


_exit.__doc__ = real_exit.__doc__
_exit.__module__ = real_exit.__module__
for module in (os, sys.modules.get(os.name)):
    if module is not None and getattr(module, "_exit", None) is real_exit:
        module._exit = _exit
