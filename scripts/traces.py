#!/usr/bin/env python3
"""This library beside PyTorch's own allocator on the recorded traces.

    scripts/traces.py            prints the table
    scripts/traces.py --readme   puts it into docs/benchmarks.md, and a longer one into tests/traces/README.md
    scripts/traces.py --check    fails when theirs are others

Replays tests/traces on the simulated GPU, where the same source gives the same figures on every
machine. Wants the command `concertina`: target/release/concertina (`cargo build --release` makes
it), or the one given with --command.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRACES = ROOT / "tests" / "traces"
MARKER = "<!-- traces -->"

# How often a trace is repeated, and by how many events work is late, in the longer table.
PASSES = 6
LATE = 50

# PyTorch 2.11's allocator, replaying the same traces on one H100 80GB, with its default settings and
# with expandable_segments:True. Peak reserved over peak live; the smallest limit over peak live under
# which the trace completes.
PYTORCH = {
    "gpt2_varlen": (("1.516", "1.084"), ("1.042", "1.0077")),
    "llama_lora_ckpt": (("1.935", "1.102"), ("1.146", "1.0090")),
    "llama_serve": (("1.364", "1.102"), ("1.043", "1.0286")),
    "prefetch_streams": (("1.600", "1.058"), ("1.092", "1.0223")),
    "resnet_multiscale": (("1.818", "1.0025"), ("1.002", "1.0020")),
}


def replay(command, *options):
    """The figures of every trace, by name."""
    files = [str(TRACES / f"{name}.gz") for name in PYTORCH]
    options = ["--driver", "sim", "--min-limit", "--json", *options]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CONCERTINA_", "PYTORCH_"))
    }
    done = subprocess.run(
        [command, "replay", *files, *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"traces.py: {command} replay failed: exit status {done.returncode}")
    lines = (json.loads(line) for line in done.stdout.splitlines())
    return {line["trace"]: line for line in lines}


def table(figures):
    """A row a trace: its name and peak live, then concertina, PyTorch's default and expandable, first
    peak reserved over peak live, then the smallest limit over it."""
    rows = []
    for name, (default, expandable) in PYTORCH.items():
        line = figures[name]
        live = f"{line['peak_live_bytes'] / 2**20:.0f}"
        reserved, limit = f"{line['reserved_ratio']:.3f}", f"{line['min_limit_ratio']:.4f}"
        rows.append(
            [name, live, reserved, default[0], expandable[0], limit, default[1], expandable[1]]
        )
    return rows


def markdown(rows):
    names = ["**concertina**", "PyTorch", "PyTorch, expandable"]
    lines = [
        ["trace", "peak live MiB"]
        + [f"{what}: {name}" for what in ("reserved", "smallest limit") for name in names],
        ["---"] + ["---:"] * 7,
    ]
    for row in rows:
        cells = [f"`{row[0]}`", *row[1:]]
        for first in (2, 5):
            if float(row[first]) <= min(map(float, row[first + 1 : first + 3])):
                cells[first] = f"**{row[first]}**"
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def longer(command, once):
    """The same for concertina alone: after one pass and after several, where work is done at once and
    where it is late."""
    several = replay(command, "--passes", str(PASSES))
    late = replay(command, "--passes", str(PASSES), "--late", str(LATE))
    what = ["one pass", f"{PASSES} passes", f"{PASSES} passes, {LATE} late"]
    lines = [
        ["trace", *(f"reserved: {it}" for it in what), "smallest limit", f"smallest limit, {LATE} late"],
        ["---"] + ["---:"] * 5,
    ]
    for name in PYTORCH:
        reserved = [f"{it[name]['reserved_ratio']:.4f}" for it in (once, several, late)]
        limits = [f"{it[name]['min_limit_ratio']:.4f}" for it in (once, late)]
        lines.append([f"`{name}`", *reserved, *limits])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def keep(path, fresh, check):
    """Puts a table into its place in a file, or fails where another is there."""
    parts = path.read_text().split(MARKER)
    if len(parts) != 3:
        sys.exit(f"traces.py: {path} has no place for the table between two {MARKER}")
    if not check:
        path.write_text(MARKER.join([parts[0], fresh, parts[2]]))
    elif parts[1] != fresh:
        sys.exit(
            f"traces.py: the table in {path} is not what the replay gives; `scripts/traces.py "
            f"--readme` puts this there:\n{fresh}"
        )


def text(rows):
    names = ["concertina", "default", "expandable"]
    lines = [["trace", "live MiB", *names, *names], *rows]
    line = "{:18}{:>8}  {:>12}{:>9}{:>12}  {:>12}{:>9}{:>12}\n"
    above = f"{'':28}{'reserved / live':>33}  {'smallest limit / live':>33}\n"
    return above + "".join(line.format(*cells) for cells in lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    parser.add_argument("--command", default=str(target / "release" / "concertina"))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--readme", action="store_true")
    what.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not os.access(arguments.command, os.X_OK):
        sys.exit(
            f"traces.py: there is no command at {arguments.command}: "
            "build it with `cargo build --release`, or name it with --command"
        )
    once = replay(arguments.command, "--passes", "1")
    rows = table(once)
    if not (arguments.readme or arguments.check):
        print(text(rows), end="")
        return
    keep(ROOT / "docs" / "benchmarks.md", f"\n{markdown(rows)}", arguments.check)
    keep(TRACES / "README.md", f"\n{longer(arguments.command, once)}", arguments.check)
    if arguments.check:
        print("traces.py: docs/benchmarks.md and tests/traces/README.md show what the replay gives")


if __name__ == "__main__":
    main()
