#!/usr/bin/env python3
"""Makes the pictures of the documentation, docs/pictures/*.svg, for light and dark screens.

    scripts/pictures.py            writes them, and the text of README.md that stands for the first
    scripts/pictures.py --check    fails when what is there is not what this would write

`reserved.svg` shows peak reserved over peak live of tests/bench/results.json, as measured on one GPU
(`python3 tests/bench/bench.py --keep FILE` keeps new results); `remap.svg` shows how free chunks are
remapped. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "tests" / "bench" / "results.json"
README = ROOT / "README.md"
MARKER = "<!-- jobs -->"

# Name in the results, name in the picture, class of its bars; in the order in which they are drawn.
ALLOCATORS = [
    ("pytorch", "PyTorch, default", "default"),
    ("expandable", "PyTorch, expandable_segments:True", "expandable"),
    ("concertina", "concertina", "ours"),
]

# Class: light, dark. A background of their own, as a viewer may have either behind them.
COLOURS = {
    "back": ("#fcfcfb", "#1a1a19"),
    "text": ("#1f1f1e", "#f2f1ee"),
    "muted": ("#63625e", "#b3b1aa"),
    "line": ("#d6d5d0", "#41403c"),
    "default": ("#b4b2ab", "#67655f"),
    "expandable": ("#7f7d76", "#98968e"),
    "ours": ("#2a78d6", "#3987e5"),
    "used": ("#b4b2ab", "#67655f"),
    "free": ("#2a78d6", "#3987e5"),
    "number": ("#ffffff", "#ffffff"),
    "on": ("#1f1f1e", "#ffffff"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def style(theme):
    rules = [f".{name} {{ fill: {colours[theme]}; }}" for name, colours in COLOURS.items()]
    line, free = COLOURS["line"][theme], COLOURS["free"][theme]
    rules.append(f".grid {{ stroke: {line}; stroke-width: 1; }}")
    rules.append(f".gone {{ fill: none; stroke: {free}; stroke-width: 1.5; stroke-dasharray: 4 3; }}")
    rules.append(f".arrow {{ fill: none; stroke: {free}; stroke-width: 2; }}")
    return rules


class Picture:
    def __init__(self, width, height, title, text):
        self.width, self.height, self.title, self.text = width, height, title, text
        self.parts = []

    def rect(self, x, y, width, height, kind, radius=0):
        corner = f' rx="{radius}"' if radius else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner} class="{kind}"/>'
        )

    def label(self, x, y, text, kind="text", anchor="start", size=13, bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}" '
            f'font-size="{size}"{weight}>{escape(text)}</text>'
        )

    def path(self, points, kind):
        self.parts.append(f'<path d="{points}" class="{kind}"/>')

    def svg(self):
        light = "\n".join(f"  {rule}" for rule in style(0))
        dark = "\n".join(f"    {rule}" for rule in style(1))
        body = "\n".join(self.parts)
        return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" \
width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">
<title>{escape(self.title)}</title>
<desc>{escape(self.text)}</desc>
<style>
{light}
  @media (prefers-color-scheme: dark) {{
{dark}
  }}
</style>
<rect width="{self.width}" height="{self.height}" class="back"/>
{body}
</svg>
"""


def ratios():
    """Peak reserved over peak live, by job and allocator."""
    measured = json.loads(RESULTS.read_text())
    figures = {
        (it["case"], it["allocator"], it["field"]): it["median"]
        for it in measured["figures"]
        if it["bench"] == "trace"
    }
    jobs = [case for case, _, field in figures if field == "peak_live"]
    values = {
        job: {
            name: figures[job, name, "cold_reserved"] / figures[job, "concertina", "peak_live"]
            for name, _, _ in ALLOCATORS
        }
        for job in jobs
    }
    return values, measured["machine"]


def in_words(values):
    """What the picture shows, for those who read text."""
    jobs = (
        f"{job}: " + ", ".join(f"{of[name]:.3f}" for name, _, _ in ALLOCATORS)
        for job, of in values.items()
    )
    names = ", ".join(name for _, name, _ in ALLOCATORS)
    return f"Peak reserved over peak live memory, in the order {names}. {'; '.join(jobs)}."


def reserved(values, machine):
    left, right, top, bar, gap = 148, 60, 84, 13, 15
    group = len(ALLOCATORS) * (bar + 2) + gap
    width, height = 760, top + len(values) * group + 42
    picture = Picture(width, height, "Memory reserved, five jobs", in_words(values))
    scale = width - left - right
    picture.label(16, 28, "Peak reserved memory over peak live memory", size=16, bold=True)
    x = 16
    for _, name, kind in ALLOCATORS:
        picture.rect(x, 44, 12, 12, kind, 2)
        picture.label(x + 18, 54.5, name, bold=kind == "ours")
        x += 18 + 7.6 * len(name) + 26
    bottom = top + len(values) * group - gap / 2
    for tick in (1.0, 1.25, 1.5, 1.75, 2.0):
        x = left + (tick - 1) * scale
        picture.path(f"M{x:g} {top - 8} V{bottom:g}", "grid")
        picture.label(x, bottom + 17, f"{tick:g}" if tick > 1 else "1 = live", "muted", "middle", 12)
    for row, (job, of) in enumerate(values.items()):
        y = top + row * group
        picture.label(left - 12, y + 1.5 * (bar + 2) + 3, job, anchor="end")
        for place, (name, _, kind) in enumerate(ALLOCATORS):
            length = max((of[name] - 1) * scale, 1)
            at = y + place * (bar + 2)
            picture.rect(left, at, length, bar, kind, 2)
            ours = kind == "ours"
            text = "text" if ours else "muted"
            picture.label(left + length + 6, at + bar - 2, f"{of[name]:.3f}", text, size=12, bold=ours)
    where = f"Measured on one {machine['gpu']}, PyTorch {machine['pytorch'].split('+')[0]}"
    picture.label(width - 16, height - 8, where, "muted", "end", 11)
    return picture.svg()


def remap():
    cell, tall, left = 78, 40, 116
    width, height = 760, 304
    picture = Picture(
        width,
        height,
        "Remapping free chunks",
        "Five chunks of physical memory lie side by side; the second and the fourth are free. A request "
        "for two chunks fits in neither. Both are mapped a second time, side by side at addresses that "
        "were unused, and make one free block. Nothing is copied, and no more memory is reserved.",
    )
    picture.label(16, 28, "Free chunks are remapped, and make one free block", size=16, bold=True)
    x = 16
    for kind, name in (("used", "chunk in use"), ("free", "free chunk")):
        picture.rect(x, 42, 12, 12, kind, 2)
        picture.label(x + 18, 52.5, name)
        x += 130
    picture.path("M276.5 42.5 h11 v11 h-11 z", "gone")
    picture.label(294, 52.5, "its old address")

    def row(y, title, cells):
        picture.label(left - 14, y + tall / 2 + 5, title, anchor="end", bold=True)
        for place, (kind, name) in enumerate(cells):
            x = left + place * cell
            if kind == "gone":
                picture.path(f"M{x + 2} {y + 1} h{cell - 4} v{tall - 2} h-{cell - 4} z", "gone")
                picture.label(x + cell / 2, y + tall / 2 + 5, name, "muted", "middle")
            elif kind:
                picture.rect(x + 1, y, cell - 2, tall, kind, 3)
                on = "number" if kind == "free" else "on"
                picture.label(x + cell / 2, y + tall / 2 + 5, name, on, "middle", 14, True)

    used, free = "used", "free"
    before = [(used, "1"), (free, "2"), (used, "3"), (free, "4"), (used, "5")]
    after = [(used, "1"), ("gone", "2"), (used, "3"), ("gone", "4"), (used, "5")]
    first, second = 78, 190
    row(first, "before", before)
    end = left + len(before) * cell
    picture.label(end + 12, first + tall / 2 - 3, "A request for two chunks", "muted")
    picture.label(end + 12, first + tall / 2 + 14, "fits in neither free block.", "muted")
    row(second, "after", [*after, (free, "2"), (free, "4")])
    for place, target in ((1, 5), (3, 6)):
        x, to = left + (place + 0.5) * cell, left + (target + 0.5) * cell
        middle = (first + tall + second) / 2
        down = second - 3
        picture.path(
            f"M{x:g} {first + tall + 4} C{x:g} {middle + 8:g} {to:g} {middle - 22:g} {to:g} {down - 6:g}",
            "arrow",
        )
        picture.path(f"M{to - 5:g} {down - 8:g} L{to:g} {down} L{to + 5:g} {down - 8:g} z", "free")
    x = left + 5 * cell
    foot = second + tall + 6
    picture.path(f"M{x + 2} {foot} v6 h{2 * cell - 4} v-6", "arrow")
    picture.label(x + cell, foot + 24, "one free block of two chunks", anchor="middle")
    picture.label(left, foot + 24, "addresses \u2192", "muted", size=12)
    last = "The same physical memory as before: nothing is copied, nothing more is reserved."
    picture.label(16, height - 16, last, "muted")
    return picture.svg()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    values, machine = ratios()
    parts = README.read_text().split(MARKER)
    if len(parts) != 3:
        sys.exit(f"pictures.py: {README} has no place between two {MARKER}")
    shown = f"![{in_words(values)}](docs/pictures/reserved.svg)"
    wanted = {
        PICTURES / "reserved.svg": reserved(values, machine),
        PICTURES / "remap.svg": remap(),
        README: MARKER.join([parts[0], f"\n{shown}\n", parts[2]]),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"pictures.py: not what {RESULTS.name} says: {names}; scripts/pictures.py makes them")
    if check:
        print(f"pictures.py: the pictures show what {RESULTS.relative_to(ROOT)} says")
        return
    PICTURES.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
