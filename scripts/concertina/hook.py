"""Installs concertina as soon as the program has imported torch, and does nothing before."""

import sys

import concertina


def watch():
    """From now on the import of torch is followed by ``concertina.install()``. Where that fails,
    the program goes on with PyTorch's own allocator, and one line says why. A torch that is built
    without CUDA is left alone, and so is every program with ``CONCERTINA_DISABLE=1``."""
    if concertina.is_disabled():
        return
    if "torch" in sys.modules:
        _attach()
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds torch where the others find it, and has more done once it is executed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        finds = (getattr(finder, "find_spec", None) for finder in others)
        specs = (find(name, path, target) for find in finds if find)
        spec = next((spec for spec in specs if spec), None)
        loader = spec and spec.loader
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def execute_and_attach(module):
                del loader.exec_module
                execute(module)
                # Not before: many ask for the spec only to see whether there is a torch.
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                _attach()

            loader.exec_module = execute_and_attach
        return spec


def _attach():
    import torch

    if torch.version.cuda is None:
        return
    try:
        # Other mistakes were named before the program started, or are of its own making.
        concertina.install(_limits_only=True)
        # Whoever starts a program with concertina wants it rather than what the program says.
        sys.modules["_concertina"].stays = True
    except concertina.Misconfigured:
        # Rather than without the limit that was meant. The library has said what is wrong.
        raise SystemExit(2) from None
    except Exception as error:
        why = " ".join(str(error).split())
        print(f"concertina: PyTorch keeps its own allocator: {why}", file=sys.stderr)
