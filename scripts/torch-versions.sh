#!/usr/bin/env bash
# Runs the cases of tests/torch on the simulated GPU with other releases of PyTorch than the one that
# scripts/test.sh tries, and says in a line for each what holds.
#
#   scripts/torch-versions.sh [VERSION...]        one of each kind where none is named
#
# Each is fetched the first time, and then takes up to 2 GB under ~/.cache/concertina. What
# the cases printed is in torch-VERSION.out in the current directory.
set -uo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- 2.9.1 2.10.0 2.12.1 2.13.0 2.15.0
for version in "$@"; do
    [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || {
        echo "torch-versions.sh: '$version' is not a version such as 2.10.0" >&2
        exit 2
    }
done
# What the library says of a release that it does not know every part of: no failure by itself.
missing="as under any pluggable allocator only"
status=0
for version in "$@"; do
    out=torch-$version.out
    if python3 "$root/tests/torch/run.py" --verbose --torch "$version" --known "$missing" \
        >"$out" 2>&1; then
        fails="nothing"
    else
        status=1
        fails=$(sed -n '/^torch .* could not be run/,$ s/^FAIL //p' "$out" | paste -sd ';' | sed 's/;/, /g')
        fails=${fails:-$(tail -n 1 "$out")}
    fi
    counts=$(sed -n 's/^torch .* on .*: \(.* could not be run\).*/\1/p' "$out")
    says=$(sed -n "s/^  | concertina: \(.*$missing.*\)/; it says: \1/p" "$out" | sort -u | head -n 1)
    echo "torch $version: ${counts:-nothing was run}; what fails: $fails$says"
done
exit "$status"
