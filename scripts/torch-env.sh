#!/usr/bin/env bash
# Makes a Python environment with PyTorch for machines without a GPU, once, and prints the path of
# its python.
#
#   scripts/torch-env.sh [VERSION[+CUDA]] [PYTHON]
#
# VERSION is one of torch on PyPI, 2.11.0 without. CUDA is a build for another CUDA version, such as
# cu126, which comes from download.pytorch.org. PYTHON is a version of Python such as 3.13, or 3.13t for
# the free-threaded build; the present python3 without. One that is not installed is fetched where there
# is uv. Exit status 3 says that there is no such Python.
#
# The environment is in ${XDG_CACHE_HOME:-$HOME/.cache}/concertina/torch-VERSION. Of NVIDIA's libraries
# it has blank ones (tests/torch/blanks.py) instead of more than 2 GB, and none of the driver and the
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
wanted=${2:-}
fail() {
    echo "torch-env.sh: $*" >&2
    exit 1
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(\+cu[0-9]+)?$ ]] ||
    fail "'$version' is not a version such as 2.11.0 or 2.11.0+cu126"
[[ $wanted =~ ^(3\.[0-9]+t?)?$ ]] || fail "'$wanted' is not a version of Python such as 3.13 or 3.13t"
cache=${XDG_CACHE_HOME:-${HOME:?torch-env.sh: neither XDG_CACHE_HOME nor HOME is set}/.cache}/concertina
into=$cache/torch-$version${wanted:+-python$wanted}
python=$into/bin/python
# Made anew when the blank libraries are made another way.
complete=$into/complete-$(cksum <tests/torch/blanks.py | cut -d' ' -f1)
if [ -e "$complete" ] && "$python" -c "" 2>/dev/null; then
    echo "$python"
    exit
fi

# The interpreter: on the PATH, pyenv's, or one that uv knows or fetches.
find_python() {
    [ -n "$wanted" ] || {
        echo python3
        return
    }
    local found pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for found in "python$wanted" "$pyenv/${wanted%t}".*/"bin/python$wanted"; do
        if "$found" -c "" 2>/dev/null; then
            echo "$found"
            return
        fi
    done
    command -v uv >/dev/null || return 1
    uv python find "$wanted" 2>/dev/null ||
        { uv python install --quiet "$wanted" 2>/dev/null && uv python find "$wanted" 2>/dev/null; }
}

for tool in python3 cc nm readelf flock; do
    command -v "$tool" >/dev/null || fail "$tool is missing"
done
base=$(find_python) || {
    echo "torch-env.sh: there is no Python $wanted here" >&2
    exit 3
}
"$base" -c "import venv, ensurepip" 2>/dev/null ||
    fail "$base has no venv module (Debian and Ubuntu: python3-venv)"
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ -e "$complete" ] && "$python" -c "" 2>/dev/null; then
    echo "$python"
    exit
fi

log=$into.log
rm -rf "$into"
"$base" -m venv "$into" >"$log" 2>&1 || fail "no virtual environment could be made: see $log"
install() {
    "$into/bin/pip" install --quiet --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 ||
        fail "pip install ${*: -1} failed (is there a network?): $(tail -n 1 "$log")"
}
index=()
[[ $version != *+* ]] || index=(--index-url "https://download.pytorch.org/whl/${version#*+}")
install --no-compile --no-deps "${index[@]}" "torch==$version"
# What importing torch needs, and numpy, which its DataLoader and tests use.
install --no-compile filelock fsspec jinja2 networkx sympy typing-extensions numpy
# Python 3.12 and newer come without it, and torch.compile of some releases wants it.
install --no-compile setuptools
python3 tests/torch/blanks.py "$into"/lib/python3*/site-packages/torch/lib >>"$log" 2>&1 ||
    fail "the blank libraries could not be made: $(tail -n 1 "$log")"
touch "$complete"
echo "$python"
