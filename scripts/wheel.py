"""Puts the wheel together for scripts/wheel.sh: wheel.py LIBRARY COMMAND DIRECTORY"""

import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULE = ROOT / "scripts/concertina"
HEADER = ROOT / "include/concertina.h"
LICENCES = sorted(ROOT.glob("LICENSE-*"))
# The same wheel from the same files: the least time that an archive can tell.
TIME = (1980, 1, 1, 0, 0, 0)


def main():
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    library, command, directory = map(pathlib.Path, sys.argv[1:])
    version = manifest("version")
    says = subprocess.run([command, "--version"], capture_output=True, text=True).stdout.strip()
    if says != f"concertina {version}":
        raise SystemExit(f"wheel.sh: {command} is '{says}', and this is {version}: build it anew")

    name = f"concertina_cuda-{version}"
    tag = f"py3-none-{system([library, command])}"
    info, data = f"{name}.dist-info", f"{name}.data"
    sources = sorted(MODULE.rglob("*.py"))
    files = {f"concertina/{path.relative_to(MODULE)}": path.read_bytes() for path in sources}
    files["concertina/libconcertina.so"] = library.read_bytes()
    files["concertina/include/concertina.h"] = HEADER.read_bytes()
    files[f"{data}/scripts/concertina"] = command.read_bytes()
    files |= {f"{info}/licenses/{path.name}": path.read_bytes() for path in LICENCES}
    files[f"{info}/METADATA"] = metadata(version).encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: scripts/wheel.sh\nRoot-Is-Purelib: false\nTag: {tag}\n"
    ).encode()
    record = [f"{path},{checksum(text)},{len(text)}\n" for path, text in files.items()]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()

    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{name}-{tag}.whl"
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path, TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            runs = path.endswith((".so", "scripts/concertina"))
            entry.external_attr = (0o100755 if runs else 0o100644) << 16
            archive.writestr(entry, text)
    new.replace(wheel)
    print(wheel)


def system(built):
    """The tag of the systems that the files run on: by the newest glibc that one of them asks for."""
    wanted = [int(minor) for path in built
              for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(wanted)}_{platform.machine()}"


def manifest(key):
    return re.search(rf'^{key} = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]


def metadata(version):
    return "".join([
        "Metadata-Version: 2.4\n",
        "Name: concertina-cuda\n",
        f"Version: {version}\n",
        f"Summary: {manifest('description')}\n",
        f"License-Expression: {manifest('license')}\n",
        *(f"License-File: {path.name}\n" for path in LICENCES),
        f"Project-URL: Source, {manifest('repository')}\n",
        "Requires-Python: >=3.10\n",
        "Description-Content-Type: text/markdown\n\n",
        (ROOT / "README.md").read_text(),
    ])


def checksum(text):
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest())
    return f"sha256={digest.decode().rstrip('=')}"


if __name__ == "__main__":
    main()
