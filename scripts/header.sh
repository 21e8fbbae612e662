#!/bin/sh
# Brings include/concertina.h up to date with the entry points.
set -eu
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
[ $# -eq 0 ] || {
    echo "header.sh: '$*' means nothing here; it takes no arguments" >&2
    exit 2
}
cd "$(dirname "$0")/.."
header=$(cargo build --quiet --lib --message-format=json |
    sed -n 's/.*"reason":"build-script-executed".*"CONCERTINA_GENERATED_HEADER","\([^"]*\)".*/\1/p')
if [ ! -f "$header" ]; then
    echo "header.sh: the build left no header" >&2
    exit 1
fi
cp "$header" include/concertina.h
