"""What concertina costs beside PyTorch's own allocator, measured side by side: see scripts/bench.sh,
which starts this.

On a machine with a GPU and PyTorch: one allocation and its release (several sizes; 2000 live blocks
of random sizes, replaced at random; 1 to 8 threads; 100 to 1,000,000 live blocks; through PyTorch's
wrapper for allocators from outside, with an empty one as the floor), the recorded traces from an
empty pool and again, and copies inside the pool's memory. Allocators take turns, each in processes of
its own; figures are medians. PyTorch's own runs with three settings.

Without a GPU only concertina is measured, on the simulated GPU, whose driver calls cost nothing like a
GPU's.
"""

import argparse
import array
import gzip
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.json"
MARKER = "<!-- bench -->"
TRACES = sorted((ROOT / "tests" / "traces").glob("*.gz"))

OURS = "concertina"
PEERS = {
    "pytorch": "PyTorch",
    "expandable": "PyTorch, expandable",
    "async": "PyTorch, cudaMallocAsync",
}
NAMES = {OURS: OURS, **PEERS}


class Run:
    """Measurements as they come in, and what could not be measured."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.values = {}
        self.failed = []

    def fail(self, what, why):
        why = why.strip().splitlines()[-1:] or ["no word of why"]
        self.failed.append({"what": what, "why": why[0]})
        print(f"bench.py: {what} failed: {why[0]}", file=sys.stderr, flush=True)

    def add(self, bench, case, allocator, field, value):
        """One more value of a figure; every figure is a median of its values."""
        key = (bench, case, allocator, field)
        self.values.setdefault(key, []).append(value)

    def lines(self, what, command, timeout, env=None):
        """The JSON lines that a command prints, up to where it fails if it does."""
        env = os.environ | (env or {})
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env=env, cwd=ROOT
            )
            text, status, why = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            text = error.stdout or ""
            text = text.decode() if isinstance(text, bytes) else text
            status, why = 1, f"it took more than {timeout} s"
        except OSError as error:
            text, status, why = "", 1, str(error)
        if status:
            self.fail(what, why)
        for line in text.splitlines():
            if line.startswith("{") and line.endswith("}"):
                yield json.loads(line)

    def summary(self):
        figures = [
            {
                "bench": bench,
                "case": case,
                "allocator": allocator,
                "field": field,
                "median": statistics.median(values),
                "values": values,
            }
            for (bench, case, allocator, field), values in self.values.items()
        ]
        return {"figures": figures, "failed": self.failed}


def note_pairs(run, allocator, lines):
    for line in lines:
        bench = line["bench"]
        stream = ", default stream" if "stream" in line else ""
        case = {
            "pair": lambda: size(line["bytes"]) + stream,
            "mixed": lambda: f"{line['live']:,} live" + stream,
            "scale": lambda: f"{line['live']:,} live" + stream,
            "threads": lambda: some(line["threads"], "thread") + " on " + some(line["streams"], "stream"),
            "floor": lambda: line["what"],
        }[bench]()
        run.add(bench, case, allocator, "ns", line["ns"])


def note_traces(run, allocator, lines):
    name = None
    for line in lines:
        if "trace" in line:
            name = line["trace"]
            continue
        events = line["events"]
        run.add("trace", name, allocator, "cold_ms", line["cold_ns"] * events / 1e6)
        run.add("trace", name, allocator, "cold_reserved", line["cold_reserved"])
        run.add("trace", name, allocator, "reserved", line["reserved"])
        if "warm_ns" in line:
            run.add("trace", name, allocator, "warm_ns", line["warm_ns"])


def some(count, what):
    return f"{count} {what}{'s' * (count > 1)}"


def size(count):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"


def pack(path, target):
    """Puts a trace into the form that measure.h reads. Returns its peak live bytes."""
    events, places, streams, live, peak = array.array("Q"), {}, {}, 0, 0
    sizes = {}
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as lines:
        for line in lines:
            fields = line.split()
            if fields[0] == "a":
                number, count = int(fields[1]), int(fields[2])
                # The default stream has the first place.
                place = streams.setdefault(fields[3], len(streams) + ("0" not in streams))
                place = 0 if fields[3] == "0" else place
                sizes[number] = (count + 511) // 512 * 512
                live += sizes[number]
                peak = max(peak, live)
                places[number] = place
                events.extend((count, place << 32 | number))
            elif fields[0] == "f":
                number = int(fields[1])
                live -= sizes.pop(number)
                events.extend((0, places[number] << 32 | number))
    with open(target, "wb") as file:
        events.tofile(file)
    return peak


def compiler():
    return os.environ.get("CXX", "c++")


def build(run, source, target, flags):
    command = [compiler(), "-O2", "-std=c++17", "-pthread", str(HERE / source), "-o", str(target)]
    try:
        done = subprocess.run([*command, *flags, "-ldl"], capture_output=True, text=True)
    except OSError as error:
        run.fail(f"building {source}", str(error))
        return False
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        run.fail(f"building {source}", (errors or [done.stderr])[0])
    return done.returncode == 0


def has_gpu():
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def machine():
    processor = platform.processor() or platform.machine()
    try:
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    about = {"processor": processor, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        found = []
    if found:
        about["gpu"], about["driver"] = (part.strip() for part in found[0].split(","))
    return about


def on_simulation(run, options, library):
    """Ours alone."""
    if "pairs" not in options.skip and build(run, "library.cpp", run.scratch / "library", []):
        for _ in range(options.rounds):
            command = [run.scratch / "library", library, "pairs", "5", "50000", "sim"]
            standin = subprocess.run([ROOT / "scripts/standin.sh"], check=True, capture_output=True)
            env = {"LD_LIBRARY_PATH": standin.stdout.decode().strip()}
            note_pairs(run, OURS, run.lines("pairs", command, 300, env))
    if "traces" in options.skip:
        return
    command = [options.command, "replay", "--driver", "sim", "--passes", "4", "--json"]
    for line in run.lines("traces", [*command, *options.traces], 600):
        name = line["trace"]
        run.add("trace", name, OURS, "peak_live", line["peak_live_bytes"])
        run.add("trace", name, OURS, "cold_ms", line["ns_per_event_cold"] * line["events"] / 1e6)
        run.add("trace", name, OURS, "warm_ns", line["ns_per_event_warm"])
        run.add("trace", name, OURS, "cold_reserved", line["peak_reserved_bytes_cold"])
        run.add("trace", name, OURS, "reserved", line["peak_reserved_bytes"])


def on_gpu(run, options, library, flags):
    """Everything, in turns."""
    repeats, count, passes = ("5", "20000", "5") if options.quick else ("9", "50000", "5")
    program, peer = run.scratch / "library", run.scratch / "pytorch.so"
    ours = build(run, "library.cpp", program, [])
    peers = []
    if "flags" in flags:
        shared = ["-fPIC", "-shared", *flags["flags"]]
        if build(run, "pytorch.cpp", peer, shared):
            peers = list(PEERS)
    else:
        print(f"concertina alone, there is no PyTorch to compare it with: {flags['missing']}")
    traces = {}
    for path in map(pathlib.Path, options.traces):
        name = path.name.removesuffix(".gz")
        traces[name] = run.scratch / f"{name}.events"
        try:
            run.add("trace", name, OURS, "peak_live", pack(path, traces[name]))
        except (OSError, ValueError, IndexError, KeyError) as error:
            run.fail(name, f"{path}: {error}")
            del traces[name]
    python = [sys.executable, str(HERE / "peer.py"), str(peer)]
    env = {"CONCERTINA_LIBRARY": str(library)}
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
        if ours and "pairs" not in options.skip:
            more = str(5 * int(count))
            command = [program, library, "pairs", repeats, more]
            note_pairs(run, OURS, run.lines(f"pairs, {OURS}", command, 120))
        for name in peers if "pairs" not in options.skip else []:
            command = [*python, name, "pairs", repeats, count]
            note_pairs(run, name, run.lines(f"pairs, {NAMES[name]}", command, 120))
        if peers and "wrapper" not in options.skip:
            command = [*python, OURS, "wrapper", "9", count]
            for line in run.lines("the wrapper", command, 120, env):
                case = f"{size(line['bytes'])}, {line['where']}"
                run.add("wrapper", case, OURS, "ns", line["ns"])
                run.add("wrapper", case, OURS, "floor_ns", line["floor_ns"])
        if "traces" in options.skip:
            continue
        for name, path in traces.items() if ours else ():
            command = [program, library, "trace", passes, path]
            lines = run.lines(f"{name}, {OURS}", command, 120)
            note_traces(run, OURS, [{"trace": name}, *lines])
        for name in peers:
            named = [f"{trace}={path}" for trace, path in traces.items()]
            command = [*python, name, "traces", passes, *named]
            lines = run.lines(f"traces, {NAMES[name]}", command, 240)
            note_traces(run, name, lines)
    if ours and "bandwidth" not in options.skip:
        command = [program, library, "bandwidth", "5000"]
        for line in run.lines("bandwidth", command, 120):
            case = f"{line['memory']}, {line['mib']} MiB"
            run.add("bandwidth", case, OURS, "gb_per_s", line["gb_per_s"])
            run.add("bandwidth", case, OURS, "plain_gb_per_s", line["plain_gb_per_s"])


class Figures:
    """The medians of a summary, by what they are."""

    def __init__(self, summary):
        self.medians = {
            (f["bench"], f["case"], f["allocator"], f["field"]): f["median"]
            for f in summary["figures"]
        }

    def cases(self, bench):
        return list(dict.fromkeys(case for (of, case, *_) in self.medians if of == bench))

    def get(self, bench, case, allocator, field):
        return self.medians.get((bench, case, allocator, field))


def rows(figures):
    """Every row of the table: what, digits after the point, ours, the peers' in their order. Less is
    better in all of them."""
    allocators = list(NAMES)
    titles = {
        "pair": "a pair, {}, ns",
        "mixed": "a pair, {}, 512 B to 16 MiB, ns",
        "threads": "a pair, {}, ns",
        "scale": "a pair, {}, 512 B to 64 KiB, ns",
    }
    for bench, title in titles.items():
        for case in figures.cases(bench):
            values = [figures.get(bench, case, name, "ns") for name in allocators]
            yield title.format(case), 1, values
    for field, title, digits in (
        ("warm_ns", "{}, warm, ns an event", 1),
        ("cold_ms", "{}, from an empty pool, ms", 0),
        ("cold_reserved", "{}, reserved / peak live", 4),
    ):
        for case in figures.cases("trace"):
            values = [figures.get("trace", case, name, field) for name in allocators]
            live = figures.get("trace", case, OURS, "peak_live")
            if field == "cold_reserved":
                values = [value and live and value / live for value in values]
            yield title.format(case), digits, values


def shown(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(ours, theirs):
    return "-" if not ours or theirs is None else f"{theirs / ours:.2f}"


def text(figures):
    """The table for a terminal: every figure, and each peer's as a multiple of ours."""
    used = [name for name in NAMES if any(key[2] == name for key in figures.medians)]
    places = [list(NAMES).index(name) for name in used]
    heads = [OURS] + [name for name in used[1:]] + [f"{name}/ours" for name in used[1:]]
    lines = ["".join([f"{'':52}", *(f"{head:>17}" for head in heads)])]
    for what, digits, values in rows(figures):
        cells = [shown(values[place], digits) for place in places]
        cells += [ratio(values[0], values[place]) for place in places[1:]]
        lines.append("".join([f"{what:52}", *(f"{cell:>17}" for cell in cells)]))
    for case in figures.cases("wrapper"):
        ours, floor = (figures.get("wrapper", case, OURS, f) for f in ("ns", "floor_ns"))
        lines.append(
            f"a pair through PyTorch's wrapper, {case}: {ours:.1f} ns; "
            f"around an allocator that does nothing: {floor:.1f} ns"
        )
    for case in figures.cases("floor"):
        lines.append(f"beside: {case}: {figures.get('floor', case, OURS, 'ns'):.1f} ns")
    for case in figures.cases("bandwidth"):
        ours = figures.get("bandwidth", case, OURS, "gb_per_s")
        plain = figures.get("bandwidth", case, OURS, "plain_gb_per_s")
        lines.append(
            f"a copy inside the pool's memory ({case}): {ours:.0f} GB/s; "
            f"inside one cudaMalloc block: {plain:.0f} GB/s"
        )
    return "\n".join(lines)


def markdown(summary):
    """The table of docs/benchmarks.md."""
    figures, about = Figures(summary), summary["machine"]
    lines = [["", *(f"**{name}**" if name == OURS else name for name in NAMES.values())]]
    lines.append(["---"] + ["---:"] * len(NAMES))
    for what, digits, values in rows(figures):
        cells = [shown(value, digits) for value in values]
        # Less is better in every row.
        if values[0] is not None and values[0] <= min(it for it in values if it is not None):
            cells[0] = f"**{cells[0]}**"
        lines.append([what, *cells])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = text(figures).splitlines()
    notes = [f"- {line}\n" for line in notes if line.startswith(("a pair through", "beside: ", "a copy"))]
    where = f"{about['gpu']}, driver {about['driver']}, {about['processor']}"
    measured = f"PyTorch {about['pytorch']}, {about['date']}"
    return f"\n{table}\n{''.join(notes)}\nMeasured on one {where}, {measured}.\n"


def document(check):
    """Puts the kept results into docs/benchmarks.md, or compares the two."""
    summary = json.loads(RESULTS.read_text())
    path = ROOT / "docs" / "benchmarks.md"
    parts = path.read_text().split(MARKER)
    if len(parts) != 3:
        sys.exit(f"bench.py: {path} has no place for the table between two {MARKER}")
    fresh = markdown(summary)
    if not check:
        path.write_text(MARKER.join([parts[0], fresh, parts[2]]))
    elif parts[1] != fresh:
        sys.exit(
            f"bench.py: the table in {path} is not what {RESULTS} says; `bench.py --keep {RESULTS}` puts it there"
        )
    else:
        print(f"bench.py: {path.relative_to(ROOT)} shows what {RESULTS.relative_to(ROOT)} says")


def main():
    parser = argparse.ArgumentParser(
        prog="scripts/bench.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two rounds of less: some 4 minutes")
    parser.add_argument("--rounds", type=int, help="how often each allocator has its turn")
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--sim", action="store_true", help="the simulated GPU, even where there is one")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        choices=["pairs", "wrapper", "traces", "bandwidth"],
        help="leave a part out",
    )
    parser.add_argument("--traces", nargs="+", default=list(map(str, TRACES)), metavar="FILE")
    parser.add_argument(
        "--keep",
        metavar="FILE",
        help="measure nothing: keep FILE, which --json wrote, in docs/benchmarks.md",
    )
    parser.add_argument(
        "--check", action="store_true", help="measure nothing: compare docs/benchmarks.md with what was kept"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 3)
    if options.keep:
        kept = json.loads(pathlib.Path(options.keep).read_text())
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    if options.keep or options.check:
        document(options.check)
        return
    library = pathlib.Path(os.environ["CONCERTINA_LIBRARY"]).resolve()
    options.command = str(library.parent / "concertina")
    for name in [name for name in os.environ if name.startswith("CONCERTINA_")]:
        del os.environ[name]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(pathlib.Path(scratch))
        about = machine()
        if options.sim or not has_gpu():
            print("on the simulated GPU, concertina alone: there is no GPU here to compare on")
            about["driver"] = "sim"
            on_simulation(run, options, library)
        else:
            probe = [sys.executable, HERE / "peer.py", "--flags"]
            flags = next(run.lines("PyTorch", probe, 240), {"missing": "see above"})
            about["pytorch"] = flags.get("pytorch")
            on_gpu(run, options, library, flags)
        summary = {
            "machine": about,
            "quick": options.quick,
            "rounds": options.rounds,
            "seconds": round(time.monotonic() - start),
            **run.summary(),
        }
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    print(text(Figures(summary)))
    for failed in run.failed:
        print(f"not measured: {failed['what']}: {failed['why']}")
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    main()
