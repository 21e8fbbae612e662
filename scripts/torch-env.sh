#!/usr/bin/env bash
# Makes a Python environment with PyTorch for machines without a GPU, once, and prints the path of
# its python.
#
#   scripts/torch-env.sh [VERSION]        VERSION of torch on PyPI; 2.11.0 without
#
# It lies in ${XDG_CACHE_HOME:-$HOME/.cache}/concertina/torch-VERSION. Of NVIDIA's libraries it has
# blank ones (tests/torch/blanks.py) instead of more than 2 GB, and none of the driver and the
# runtime: programs run in it with the stand-ins of scripts/standin.sh.
set -euo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
cd "$(dirname "$0")/.."

version=${1:-2.11.0}
fail() {
    echo "torch-env.sh: $*" >&2
    exit 1
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "'$version' is not a version such as 2.11.0"
cache=${XDG_CACHE_HOME:-${HOME:?torch-env.sh: neither XDG_CACHE_HOME nor HOME is set}/.cache}/concertina
into=$cache/torch-$version
python=$into/bin/python
# Made anew when the blank libraries are made another way.
complete=$into/complete-$(cksum <tests/torch/blanks.py | cut -d' ' -f1)
if [ -e "$complete" ] && "$python" -c "" 2>/dev/null; then
    echo "$python"
    exit
fi

for tool in python3 cc nm readelf flock; do
    command -v "$tool" >/dev/null || fail "$tool is missing"
done
python3 -c "import venv, ensurepip" 2>/dev/null ||
    fail "python3 has no venv module (Debian and Ubuntu: python3-venv)"
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ -e "$complete" ] && "$python" -c "" 2>/dev/null; then
    echo "$python"
    exit
fi

log=$cache/torch-$version.log
rm -rf "$into"
python3 -m venv "$into" >"$log" 2>&1 || fail "no virtual environment could be made: see $log"
install() {
    "$into/bin/pip" install --quiet --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 ||
        fail "pip install ${*: -1} failed (is there a network?): $(tail -n 1 "$log")"
}
install --no-compile --no-deps "torch==$version"
# What importing torch needs, and numpy, which its DataLoader and tests use.
install --no-compile filelock fsspec jinja2 networkx sympy typing-extensions numpy
python3 tests/torch/blanks.py "$into"/lib/python3*/site-packages/torch/lib >>"$log" 2>&1 ||
    fail "the blank libraries could not be made: $(tail -n 1 "$log")"
touch "$complete"
echo "$python"
