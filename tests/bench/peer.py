"""Measures the allocator that PyTorch uses, in a process of its own; bench.py starts it.

    python3 peer.py --flags                           how to build pytorch.cpp, and what PyTorch this is
    python3 peer.py PYTORCH.SO ALLOCATOR pairs REPEATS PAIRS
    python3 peer.py PYTORCH.SO ALLOCATOR wrapper REPEATS PAIRS
    python3 peer.py PYTORCH.SO ALLOCATOR traces PASSES NAME=FILE...

Prints lines of JSON.
"""

import ctypes
import json
import os
import pathlib
import shutil
import sys

# By the name that bench.py uses: PyTorch's settings.
SETTINGS = {
    "pytorch": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "concertina": None,
}


def flags():
    """What the compiler needs to be told, and about this PyTorch; or why there is none to measure."""
    try:
        import torch
    except ImportError as error:
        return {"missing": str(error)}
    if not torch.cuda.is_available():
        return {"missing": "PyTorch finds no GPU"}
    root = pathlib.Path(torch.__file__).parent
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and pathlib.Path(nvcc).parents[1], "/usr/local/cuda"]
    homes += root.parent.glob("nvidia/cu*")
    cuda = [str(pathlib.Path(home) / "include") for home in homes if home]
    includes = [str(root / "include"), str(root / "include/torch/csrc/api/include"), *cuda]
    return {
        "flags": [
            *(f"-isystem{path}" for path in includes if os.path.isdir(path)),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-L{root / 'lib'}",
            *("-ltorch_cuda", "-ltorch_cpu", "-lc10_cuda", "-lc10"),
        ],
        "pytorch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
    }


def main():
    if sys.argv[1] == "--flags":
        print(json.dumps(flags()))
        return
    library, allocator, what, *rest = sys.argv[1:]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)
    setting = SETTINGS[allocator]
    if setting is None:
        scripts = pathlib.Path(__file__).resolve().parents[2] / "scripts"
        sys.path.insert(0, str(scripts))
        import concertina

        concertina.install()
    else:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
    import torch

    torch.zeros(1, device="cuda")
    bench = ctypes.CDLL(library)
    failed = 0
    if what == "traces":
        for trace in rest[1:]:
            name, path = trace.split("=", 1)
            print(json.dumps({"trace": name}), flush=True)
            failed |= bench.bench_trace(path.encode(), int(rest[0]))
    else:
        measure = {"pairs": bench.bench_pairs, "wrapper": bench.bench_wrapper}[what]
        failed = measure(int(rest[0]), ctypes.c_long(int(rest[1])))
    sys.stdout.flush()
    # Nothing more is asked of an allocator that has been measured.
    os._exit(failed)


if __name__ == "__main__":
    main()
