#!/usr/bin/env python3
"""Makes blank libraries for those of NVIDIA's that torch is linked with and the tests don't need:
cuBLAS, cuDNN, NCCL and their kin, more than 2 GB to download.

    blanks.py DIRECTORY             where torch's own libraries are, and these are put

Every function that torch asks of them is there and does nothing. Those of cuBLAS say that they have
worked, so that a model with matrices runs (with numbers that mean nothing); all others say that they
have not. libcuda.so.1 and libcudart.so are not among them: scripts/standin.sh has those.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# By name: how the functions of a library begin, where symbols carry no version that tells.
PREFIXES = {
    "libcublas.so": "cublas",
    "libcublasLt.so": "cublasLt",
    "libcudnn.so": "cudnn",
    "libcufft.so": "cufft",
    "libcufile.so": "cuFile",
    "libcupti.so": "cupti",
    "libcurand.so": "curand",
    "libcusolver.so": "cusolver",
    "libcusparse.so": "cusparse",
    "libcusparseLt.so": "cusparseLt",
    "libnccl.so": "nccl",
    "libnvJitLink.so": "nvJitLink",
    "libnvrtc.so": "nvrtc",
    "libnvshmem_host.so": "nvshmem",
    "libnvToolsExt.so": "nvtx",
}
WORKS = {"libcublas.so"}
# Named errors: the profiler reads the text without asking whether it got one.
TEXTS = {"cuptiGetResultString"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def stem(name):
    return name.partition(".so")[0] + ".so"


def wanted(torch):
    """What torch's libraries want: for each of the libraries above its functions, each with its
    version or ''."""
    functions = {}
    symbols = set()
    for library in sorted(torch.glob("*.so*")):
        dynamic = output("readelf", "--dynamic", "--wide", library)
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
            if stem(name) in PREFIXES:
                functions.setdefault(name, {})
        for line in output("nm", "--dynamic", "--undefined-only", library).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            symbols.add((symbol, version))
    for symbol, version in symbols:
        mine = [name for name in functions if symbol.startswith(PREFIXES[stem(name)])]
        if mine:
            functions[max(mine, key=lambda name: len(PREFIXES[stem(name)]))][symbol] = version
    return functions


def make(name, functions, into):
    """One library. Statuses are 0 for success everywhere; 1 is an error to all of them."""
    status = 0 if stem(name) in WORKS else 1
    versions = {}
    for function, version in sorted(functions.items()):
        versions.setdefault(version, []).append(function)
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "blank.c"), Path(scratch, "blank.map")
        source.write_text(
            "".join(
                f'long {it}(long error, const char **text) {{ *text = "blank"; return 0; }}\n'
                if it in TEXTS
                else f"long {it}(void) {{ return {status}; }}\n"
                for it in sorted(functions)
            )
        )
        script.write_text(
            "".join(
                f"{version} {{ global: {'; '.join(names)}; }};\n"
                for version, names in versions.items()
                if version
            )
        )
        command = ["cc", "-shared", "-fPIC", "-o", into / name, f"-Wl,-soname,{name}", source]
        if any(versions):
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main():
    directory = Path(sys.argv[1])
    for name, functions in wanted(directory).items():
        make(name, functions, directory)


if __name__ == "__main__":
    main()
