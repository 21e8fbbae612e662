#!/usr/bin/env bash
# Runs the cases of tests/torch on the simulated GPU with other builds of PyTorch than the one that
# scripts/test.sh tries, and says in a line for each what holds.
#
#   scripts/torch-versions.sh [--core] [VERSION[+CUDA][:PYTHON]...]
#
# VERSION is one of torch, CUDA a build for another CUDA version, and PYTHON a version of Python, as
# scripts/torch-env.sh takes them: 2.9.1, 2.11.0+cu126, 2.15.0:3.14t. Without any, one of each kind of
# release is tried. --core runs the chosen cases that each release has to pass (run.py --core) alone.
#
# Each build is fetched the first time, and then takes up to 2 GB under ~/.cache/concertina. A build whose
# Python is not installed, nor can be fetched by uv, is skipped. What the cases printed is in
# torch-VERSION.out in the current directory.
set -uo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
options=()
[ "${1:-}" != --core ] || {
    options=(--core)
    shift
}
[ $# -gt 0 ] || set -- 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.12.1 2.13.0 2.14.1 2.15.0
for build in "$@"; do
    [[ $build =~ ^[0-9]+\.[0-9]+\.[0-9]+(\+cu[0-9]+)?(:3\.[0-9]+t?)?$ ]] || {
        echo "torch-versions.sh: '$build' is not a build such as 2.10.0, 2.11.0+cu126 or 2.15.0:3.14t" >&2
        exit 2
    }
done
# What the library says of a release that lacks something by itself: no failure.
missing="as under any pluggable allocator only"
status=0
for build in "$@"; do
    IFS=: read -r version python <<<"$build"
    out=torch-${build/:/-python}.out
    interpreter=$("$root/scripts/torch-env.sh" "$version" ${python:+"$python"} 2>"$out")
    case $? in
    0) ;;
    3)
        echo "torch $build: SKIP: there is no Python $python here"
        continue
        ;;
    *)
        status=1
        echo "torch $build: nothing was run; $(tail -n 1 "$out")"
        continue
        ;;
    esac
    if python3 "$root/tests/torch/run.py" --verbose --python "$interpreter" --known "$missing" \
        "${options[@]}" >"$out" 2>&1; then
        fails="nothing"
    else
        status=1
        fails=$(sed -n '/^torch .* could not be run/,$ s/^FAIL //p' "$out" | paste -sd ';' | sed 's/;/, /g')
        fails=${fails:-$(tail -n 1 "$out")}
    fi
    counts=$(sed -n 's/^torch .* on .*: \(.* could not be run\).*/\1/p' "$out")
    says=$(sed -n "s/^  | concertina: \(.*$missing.*\)/; it says: \1/p" "$out" | sort -u | head -n 1)
    echo "torch $build: ${counts:-nothing was run}; what fails: $fails$says"
done
exit "$status"
