"""The tables of a run, as Markdown that is also readable as it stands."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import _ratios, collectives, costs, items, messages, small, submitted, training, worth
from benchmarks._harness import GLOO, MPI, PEERS

Results = dict[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def report(results: Results) -> str:
    """Return all tables of a run, the ratios last."""
    machine = results["machine"]
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, synk {machine['commit']}, {machine['date']}. "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    ]
    sections: dict[str, Callable[[Any], str]] = {
        "calls": _calls,
        "submitted": _submitted,
        "small": _small,
        "items": _items,
        "worth": _worth,
        "costs": _costs,
        "startup": _startup,
        "footprint": _footprint,
        "state": _state,
        "collectives": _collectives,
        "messages": _messages,
        "training": _training,
    }
    for family, section in sections.items():
        if family in results:
            error = results[family].get("error")
            parts.append(f"### {family}\n\n" + (f"failed: {error}" if error else section(results[family])))
    parts.append("### ratios\n\n" + table(("quantity", "median", "range"), _ratios.lines(results)))
    return "\n\n".join(parts)


# The columns of the table of calls: heading, job, quantity, factor, format.
COLUMNS: tuple[tuple[str, str, str, float, str], ...] = (
    ("tiny: over us", "tiny", "over", 1e6, ".0f"),
    ("cold: ms", "tiny, cold", "call_s", 1e3, ".3f"),
    ("1.5 ms work: outside us", "linear 1.5 ms", "outside_s", 1e6, ".0f"),
    ("share", "linear 1.5 ms", "share", 1, ".3f"),
    ("15 ms work: outside us", "linear 15 ms", "outside_s", 1e6, ".0f"),
    ("linear: call ms", "linear", "call_s", 1e3, ".2f"),
    ("5 ms work: outside us", "linear work", "outside_s", 1e6, ".0f"),
    ("share", "linear work", "share", 1, ".3f"),
    ("50 ms work: outside us", "work", "outside_s", 1e6, ".0f"),
    ("share", "work", "share", 1, ".4f"),
    ("40 MB passed: ms", "linear passed", "call_s", 1e3, ".1f"),
    ("4 KB out: over us", "output 4 KB", "over", 1e6, ".0f"),
    ("1 MB out: over us", "output 1 MB", "over", 1e6, ".0f"),
    ("64 MB out: over ms", "output 64 MB", "over", 1e3, ".1f"),
)


def _calls(family: Any) -> str:
    rows = []
    for name in ("ideal", "synk", *(spec.name for spec in PEERS)):
        cells = [_cell(family["jobs"], name, *column[1:]) for column in COLUMNS]
        starts = [seconds for seconds in family["start_s"].get(name, []) if seconds is not None]
        rows.append([name, *cells, f"{statistics.median(starts):.2f}" if starts else ""])
    problems = sorted(
        {
            f"- {name}, {job}: {rounds}"
            for job, peers in family["jobs"].items()
            for name, rounds in peers.items()
            if isinstance(rounds, str) and rounds != "not installed"
        }
    )
    text = table(("runtime", *(column[0] for column in COLUMNS), "start s"), rows)
    return text + ("\n\n" + "\n".join(problems) if problems else "")


def measured(results: Results) -> dict[str, Any]:
    """Return what the documentation's pictures draw, of the families that were measured.

    The overhead of a tiny call by runtime, in microseconds; the speed-ups by length of a call; what arguments and
    results cost by their size, and a call by the number of workers; and sums over ranks by size, against MPI, in
    seconds.
    """
    machine = results["machine"]
    found: dict[str, Any] = {}
    where = f"{machine['date']} on {machine['cores']} cores of {machine['processor']}, Python {machine['python']}"
    if "jobs" in results.get("calls", {}):
        names = ("synk", *(spec.name for spec in PEERS if spec.name not in ("bare loop", "serial NumPy, 1 thread")))
        jobs = results["calls"]["jobs"]
        texts = {name: _cell(jobs, name, "tiny", "over", 1e6, ".0f") for name in names}
        found["overhead_us"] = {
            name: int(text) for name, text in texts.items() if text.lstrip("-").isdigit() and int(text) > 0
        }
        found["overhead_measured"] = where
    if results.get("worth") and "error" not in results["worth"]:
        found["speed_ups"] = worth.speed_ups(results["worth"])
        found["speed_ups_measured"] = where
    if results.get("costs") and "error" not in results["costs"]:
        found["copies"], found["workers"] = costs.by_size(results["costs"]), costs.by_workers(results["costs"])
        found["costs_measured"] = where
    inside = {name: _sums(results.get("collectives", {}), name) for name in ("synk", MPI.name)}
    if all(inside.values()):
        found["sums"], found["sums_measured"] = inside, where
    return found


def _sums(family: Any, name: str) -> dict[str, float]:
    """Return bytes -> seconds of ``synk.comm.all_reduce`` and of its peer; empty where it was not measured."""
    found = {}
    for size, nbytes in collectives.INSIDE_SIZES.items():
        rounds = family.get(f"{collectives.COMM}all_reduce {size}", {}).get(MPI.name)
        if isinstance(rounds, list):
            found[str(nbytes)] = statistics.median(entry[name]["inner_s"] for entry in rounds)
    return found


def _cell(jobs: Any, name: str, job: str, quantity: str, factor: float, form: str) -> str:
    """Return one number: the median over the rounds; of the baselines over the rounds against all peers."""
    peers = jobs.get(job, {})
    if isinstance(peers.get(name), str):
        return peers[name].partition(":")[0]
    columns = [peers[name]] if name in peers else [rounds for rounds in peers.values() if isinstance(rounds, list)]
    values = [_quantity(entry, name, quantity) for rounds in columns for entry in rounds if name in entry]
    known = [value for value in values if value is not None]
    return format(statistics.median(known) * factor, form) if known else ""


def _quantity(entry: Any, name: str, quantity: str) -> float | None:
    if quantity == "over":
        return entry[name]["call_s"] - entry["ideal"]["call_s"]
    return entry[name].get(quantity)


def _submitted(family: Any) -> str:
    return table(("case", "way", "us a call", "to a plain call", "range"), submitted.lines(family))


def _small(family: Any) -> str:
    return table(("case", "way", "us a call", "95th percentile"), small.lines(family))


def _worth(family: Any) -> str:
    header = ("rows", "sines a row", "one process: ms", "speed-up, synk.data", "speed-up, plain array")
    return table(header, worth.lines(family))


def _costs(family: Any) -> str:
    return table(("size", *(f"{way}: us" for way in costs.WAYS)), costs.lines(family))


def _items(family: Any) -> str:
    return table(("case", "way", "s"), items.lines(family))


def _startup(family: Any) -> str:
    names = {
        "imports_numpy_s": "Pythons that import NumPy, one a worker, in parallel",
        "distributed_s": "fork + distribute",
        "first_result_s": "fork + distribute + first result",
        "import_numpy_s": "one Python, import numpy",
        "import_synk_s": "one Python, import synk",
    }
    rows = []
    for key, label in names.items():
        seconds = [entry[key] for entry in family["repetitions"]]
        rows.append(
            [label, f"{statistics.median(seconds) * 1e3:.0f}", f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}"]
        )
    return table(("", "median ms", "range"), rows)


def _footprint(family: Any) -> str:
    control, memory, many = family["control"], family["memory"], family["many_calls"]
    rows = [
        ["idle worker, % of a core", f"{100 * family['idle']['0']:.3f}"],
        ["worker at 100 tiny calls a second, % of a core", f"{100 * family['idle']['100']:.2f}"],
        ["written by the master a call and worker, B", f"{control['down']:.1f}"],
        ["written by a worker a call, B", f"{control['up']:.1f}"],
        *([f"counter {name} a call and worker", f"{value:.2f}"] for name, value in control["counters"].items()),
    ]
    for entry in memory["sizes"]:
        workers = max(worker["private_nbytes"] for worker in entry["workers"])
        label = f"Data of {entry['data_nbytes'] >> 20} MB: private MB of a worker, of the master; shared MB in all"
        numbers = (workers, entry["master"]["private_nbytes"], entry["shared_nbytes"])
        rows.append([label, ", ".join(f"{number / (1 << 20):.1f}" for number in numbers)])
    rows.append(
        ["master's peak above that during a call, MB", f"{memory['master_peak_in_call_nbytes'] / (1 << 20):.1f}"]
    )
    for process in ("master", "worker"):
        growth = ", ".join(f"{key} {value}" for key, value in many[process].items())
        rows.append([f"growth of the {process} over {many['calls']} calls", growth])
    return table(("", ""), rows)


def _state(family: Any) -> str:
    rows = []
    for case, rounds in family.items():
        if isinstance(rounds, str):
            rows.append([case, rounds, ""])
            continue
        ways = [name for name in rounds[0] if name != "noise"]
        times = {way: statistics.median(entry[way]["call_s"] for entry in rounds) for way in ways}
        against = [entry[ways[-1]]["call_s"] / entry[ways[0]]["call_s"] for entry in rounds]
        cells = ", ".join(f"{way} {seconds * 1e3:.3f}" for way, seconds in times.items())
        rows.append([case, cells, f"{statistics.median(against):.2f}"])
    return table(("case", "call ms", "last / first"), rows)


def _collectives(family: Any) -> str:
    rows = []
    for case, peers in family.items():
        if case.startswith(collectives.COMM):
            continue
        entries = [entry for rounds in peers.values() if isinstance(rounds, list) for entry in rounds]
        cells = [_milliseconds(entries, "ideal"), _milliseconds(entries, "synk")]
        ratios = []
        for spec in (MPI, GLOO):
            rounds = peers.get(spec.name, "not run")
            own = [] if isinstance(rounds, str) else rounds
            cells.append(rounds if isinstance(rounds, str) else _milliseconds(own, spec.name))
            ratios.append(_ratio(own, "synk", spec.name))
        rows.append([case, *cells, *ratios, _ratio(entries, "ideal", "synk")])
    header = ("collective", "copy ms", "synk ms", "mpi4py ms", "gloo ms", "synk / mpi4py", "synk / gloo", "copy / synk")
    inside = {case: peers for case, peers in family.items() if case.startswith(collectives.COMM)}
    of_functions = table(("inside a function", "synk us", "mpi4py us", "synk / mpi4py"), messages.lines(inside))
    return f"{table(header, rows)}\n\n{of_functions}"


def _messages(family: Any) -> str:
    return table(("message", "synk us", "mpi4py us", "synk / mpi4py"), messages.lines(family))


def _training(family: Any) -> str:
    rows = []
    for case, peers in family.items():
        if case == training.MEMORY:
            continue
        for peer, rounds in peers.items():
            own = [] if isinstance(rounds, str) else rounds
            note = rounds if isinstance(rounds, str) else _milliseconds(own, peer)
            rows.append([case, _milliseconds(own, "synk"), peer, note, _ratio(own, "synk", peer)])
    text = table(("step of training", "synk ms", "peer", "peer ms", "synk / peer"), rows)
    for peer, rounds in family.get(training.MEMORY, {}).items():
        found = rounds if isinstance(rounds, str) else _megabytes(rounds[0], peer)
        text += f"\n\nMemory of one rank after some steps with 18 MB of gradients: {found}."
    return text


def _megabytes(entry: Any, peer: str) -> str:
    return ", ".join(f"{name} {entry[name]['nbytes'] / 1e6:.0f} MB" for name in ("synk", peer))


def _milliseconds(entries: Sequence[Any], name: str) -> str:
    seconds = [entry[name]["call_s"] for entry in entries if name in entry]
    return f"{statistics.median(seconds) * 1e3:.3f}" if seconds else ""


def _ratio(entries: Sequence[Any], above: str, below: str) -> str:
    ratios = [entry[above]["call_s"] / entry[below]["call_s"] for entry in entries if above in entry and below in entry]
    return f"{statistics.median(ratios):.2f}" if ratios else ""
