"""What Python runs at its start where `concertina run` has put this directory ahead on PYTHONPATH: has
concertina attached when torch is imported, and then does what Python would have done without it."""

import os
import sys


def _watch(packages):
    # The module may be one that this Python would not find, or find another of.
    sys.path.insert(0, packages)
    try:
        from concertina import hook
    finally:
        sys.path.remove(packages)
    hook.watch()


_here = os.path.dirname(__file__)
# A program sees the paths that it sees without this one; those that it starts still have it on theirs.
sys.path[:] = [path for path in sys.path if path != _here]
# For older Pythons there is no PyTorch that takes another allocator, and they may not read the module.
if os.environ.get("CONCERTINA_DISABLE") != "1" and sys.version_info >= (3, 8):
    try:
        _watch(os.path.dirname(os.path.dirname(_here)))
    except Exception as error:
        sys.stderr.write("concertina: PyTorch keeps its own allocator: %s\n" % error)

# The user's own of this name, where there is one. If not, the error says so to whoever imports this,
# as if this file were not there.
del sys.modules[__name__]
import sitecustomize  # noqa: E402, F401
