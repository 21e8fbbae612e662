#!/usr/bin/env python3
"""Compares src/entry/torch/layouts.rs with the headers of a release of PyTorch.

    layouts.py [VERSION...]        as scripts/torch-env.sh takes them, from 2.9 on; 2.11.0 without

The classes are compiled with g++ as the release's own headers have them, and asked for their sizes and for
where their members lie; those of layouts.rs are laid out as C does. What differs is said, and is a failure.
A release that layouts.rs does not list is compared with the last that it does: what differs is what to
write there.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LAYOUTS = ROOT / "src/entry/torch/layouts.rs"

# What the allocator's header wants of CUDA, which a wheel does not bring along.
STAND_INS = {
    "cuda_runtime_api.h": """
        #pragma once
        #include <cstddef>
        typedef struct CUstream_st *cudaStream_t;
        typedef int cudaError_t;
        inline cudaError_t cudaMemGetInfo(size_t *, size_t *) { return 0; }
    """,
    "c10/cuda/CUDAStream.h": """
        #pragma once
        #include <cuda_runtime_api.h>
        #include <c10/core/DeviceGuard.h>
        #include <c10/cuda/CUDAMacros.h>
        namespace c10::cuda { struct CUDAStream { c10::Stream stream; }; }
    """,
    "c10/cuda/CUDAException.h": """
        #pragma once
        #include <c10/cuda/CUDAMacros.h>
        #include <cuda_runtime_api.h>
        #define C10_CUDA_CHECK(it) (void)(it)
    """,
    "c10/cuda/CUDAGraphsC10Utils.h": """
        #pragma once
        #include <c10/cuda/CUDAStream.h>
    """,
}

# Classes of layouts.rs: PyTorch's name, and those members that are called otherwise there.
DEVICE = "c10::CachingDeviceAllocator::"
CUDA = "c10::cuda::CUDACachingAllocator::"
NAMESPACES = (
    "using namespace c10; using namespace c10::cuda; using namespace c10::cuda::CUDACachingAllocator;"
    "using namespace c10::CachingDeviceAllocator;"
)
CLASSES = {
    "DeviceStats": {"usage": "allocation", "more_usage": "active_bytes"},
    "BlockInfo": {},
    "SegmentInfo": {},
    "TraceEntry": {
        name: name + "_"
        for name in (
            "action device context stream size mempool time compile_context user_metadata "
            "internal_metadata"
        ).split()
    }
    | {"address": "addr_"},
    "AllocatorConfigInfo": {"most": "max_round_threshold"},
    "SnapshotInfo": {"host": "host_segments"},
    "ShareableHandle": {"text": "handle"},
}

# Sizes and alignments of what the classes are made of.
KNOWN = {
    "i8": (1, 1), "bool": (1, 1), "u32": (4, 4), "i32": (4, 4), "f32": (4, 4), "u64": (8, 8),
    "i64": (8, 8), "f64": (8, 8), "isize": (8, 8), "*mut c_void": (8, 8), "CxxString": (32, 8),
    "SharedPointer": (16, 8), "CxxVector": (24, 8), "Figure": (32, 8), "Figures": (96, 8),
}  # fmt: skip


def releases(text):
    """By version: the names of how the statistics and the snapshot are laid out."""
    rows = re.findall(
        r"^    (\d+) \. (\d+): \d+ \w+ \w+ (\w+) (?:Some\(Snapshot::(\w+)\)|(None)), \w+;", text, re.M
    )
    return {(int(row[0]), int(row[1])): row[2:4] for row in rows}


def parameters(stats, snapshot):
    """What the parameters of the classes are then."""
    snapshots = {"": (0, 0, 0), "Plain": (0, 0, 0), "Cached": (0, 2, 0), "Host": (0, 2, 2),
                 "Internal": (1, 2, 2)}  # fmt: skip
    internal, cached, host = snapshots[snapshot]
    return {
        "BY_POOL": int(stats == "ByPool"),
        "REJECTIONS": int(stats != "Plain"),
        "INTERNAL": internal,
        "CACHED": cached,
        "HOST": host,
    }


def structures(text):
    found = re.findall(r"#\[repr\(C\)\]\npub struct (\w+)(?:<.*?>)? \{\n(.*?)\n\}", text, re.S)
    fields = r"^    (?:pub )?(\w+): (.+),$"
    return {name: re.findall(fields, body, re.M) for name, body in found}


def measure(kind, classes, values):
    """Size and alignment of a type."""
    if array := re.fullmatch(r"\[(.+); (\w+)\]", kind):
        size, alignment = measure(array[1], classes, values)
        count = values[array[2]] if array[2] in values else int(array[2])
        return size * count, alignment
    name = kind.partition("<")[0]
    if name in KNOWN:
        return KNOWN[name]
    return lay_out(classes[name], classes, values)[1:]


def lay_out(fields, classes, values):
    """The offsets of a class's members that are there, its size and its alignment."""
    at, most, offsets = 0, 1, {}
    for name, kind in fields:
        size, alignment = measure(kind, classes, values)
        at = -(-at // alignment) * alignment
        most = max(most, alignment)
        if size:
            offsets[name] = at
        at += size
    return offsets, -(-at // most) * most, most


def headers(version, wanted):
    """Sizes (under `sizeof`) and offsets as g++ finds them in the release's headers."""
    python = subprocess.run(
        [ROOT / "scripts/torch-env.sh", version], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    home = next(pathlib.Path(python).parent.parent.glob("lib/python3*/site-packages/torch"))
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        for name, text in STAND_INS.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        lines = [
            f'printf("{name} {member} %zu\\n", '
            + (f"sizeof({name})" if member == "sizeof" else f"offsetof({name}, {member})")
            + ");"
            for name, members in wanted.items()
            for member in members
        ]
        source = scratch / "probe.cpp"
        source.write_text(
            "#include <c10/cuda/CUDACachingAllocator.h>\n#include <cstddef>\n#include <cstdio>\n"
            + NAMESPACES
            + "int main() {\n"
            + "\n".join(lines)
            + "\n}\n"
        )
        program = scratch / "probe"
        subprocess.run(
            ["g++", "-std=c++20", "-w", "-O0", f"-I{scratch}", f"-I{home}/include", "-o", program,
             source, "-Wl,--unresolved-symbols=ignore-all"],
            check=True,
        )  # fmt: skip
        printed = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {}
    for name, member, number in map(str.split, printed.splitlines()):
        found.setdefault(name, {})[member] = int(number)
    return found


def compare(version, text):
    """What differs, a line each."""
    known, classes = releases(text), structures(text)
    short = tuple(map(int, version.split(".")[:2]))
    stats, snapshot = known.get(short) or known[max(known)]
    values = parameters(stats, snapshot)
    ours = {}
    for name, called in CLASSES.items():
        # Of which C++ gets none in this release.
        if not snapshot and name in ("SegmentInfo", "TraceEntry", "SnapshotInfo", "AllocatorConfigInfo"):
            continue
        offsets, size, _ = lay_out(classes[name], classes, values)
        ours[name] = {called.get(field, field): at for field, at in offsets.items()} | {"sizeof": size}
    theirs = headers(version, ours)
    for name, members in ours.items():
        for member, number in members.items():
            if theirs[name][member] != number:
                yield f"{name} {member}: {number} in layouts.rs, {theirs[name][member]} in the headers"


def main():
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    failed = False
    for version in sys.argv[1:] or ["2.11.0"]:
        wrong = list(compare(version, LAYOUTS.read_text()))
        print(f"torch {version}:", "; ".join(wrong) or "as in layouts.rs")
        failed = failed or bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
