"""What synk must reach and aims for, and how each number follows from the results of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import collectives, messages, small, training
from benchmarks._harness import BARE, GLOO, JAX, MPI, POOL

Results = dict[str, Any]
Values = list[float]


class NotMeasuredError(LookupError):
    """A bar's number is not in the results; the message says why."""


@dataclass(frozen=True)
class Bar:
    """One line of the table.

    Attributes
    ----------
    must, aim : float
        Upper limits, or lower ones where ``at_least``.
    values : callable
        Results to one value a round (and whether any of them was noisy).
    """

    quantity: str
    must: float
    aim: float
    values: Callable[[Results], tuple[Values, bool]]
    at_least: bool = False
    unit: str = ""

    def verdict(self, value: float) -> str:
        """Return ``aim``, ``pass`` or ``MISS``."""
        sign = -1 if self.at_least else 1
        if sign * value <= sign * self.aim:
            return "aim"
        return "pass" if sign * value <= sign * self.must else "MISS"


def rounds_of(results: Results, family: str, case: str, peer: str) -> list[Any]:
    """Return the rounds of a case against a peer.

    Raises
    ------
    NotMeasuredError
        If the family was not run, or the peer or synk was not there or failed.
    """
    cases = results.get(family, {"error": "not run"})
    if "error" in cases:
        raise NotMeasuredError(cases["error"])
    rounds = cases.get("jobs", cases).get(case, {}).get(peer, "not run")
    if isinstance(rounds, str):
        raise NotMeasuredError(f"{peer} {rounds}")
    if not rounds or "synk" not in rounds[0]:
        raise NotMeasuredError(f"synk {results['failures'].get('synk', 'not run')}")
    return rounds


def _noisy(results: Results, entries: Sequence[Any]) -> bool:
    return any(entry["noise"]["cores"] > results["max_noise"] for entry in entries)


def _overhead(case: str, peer: str) -> Callable[[Results], tuple[Values, bool]]:
    """Synk's call less the ideal's, against the same of the peer."""

    def values(results: Results) -> tuple[Values, bool]:
        rounds = rounds_of(results, "calls", case, peer)
        ratios = [
            (entry["synk"]["call_s"] - entry["ideal"]["call_s"]) / (entry[peer]["call_s"] - entry["ideal"]["call_s"])
            for entry in rounds
        ]
        return ratios, _noisy(results, rounds)

    return values


def _call(family: str, case: str, peer: str, quantity: str = "call_s") -> Callable[[Results], tuple[Values, bool]]:
    """Synk's call, or the part of it outside of the function, against the peer's."""

    def values(results: Results) -> tuple[Values, bool]:
        rounds = rounds_of(results, family, case, peer)
        return [entry["synk"][quantity] / entry[peer][quantity] for entry in rounds], _noisy(results, rounds)

    return values


def _to_best(case: str, peer: str, quantity: str = "call_s") -> Callable[[Results], tuple[Values, bool]]:
    """A quantity of synk's against that of the peer's best round: the bare loop is bimodal, with the same code."""

    def values(results: Results) -> tuple[Values, bool]:
        rounds = rounds_of(results, "calls", case, peer)
        best = min(entry[peer][quantity] for entry in rounds)
        return [entry["synk"][quantity] / best for entry in rounds], _noisy(results, rounds)

    return values


def _best_share(case: str) -> Callable[[Results], tuple[Values, bool]]:
    """As ``_share``, of the best round: both workers sometimes stay on one core."""

    def values(results: Results) -> tuple[Values, bool]:
        shares, is_noisy = _share(case)(results)
        return [max(shares)], is_noisy

    return values


def _in_one_process(
    family: str, case: str, way: str, other: str | None, scale: float = 1.0
) -> Callable[[Results], tuple[Values, bool]]:
    """One way of a family that is measured in one process, against another one (None: itself)."""

    def values(results: Results) -> tuple[Values, bool]:
        cases = results.get(family, {"error": "not run"})
        if "error" in cases:
            raise NotMeasuredError(cases["error"])
        return [entry[way] * scale / (1.0 if other is None else entry[other]) for entry in cases[case]], False

    return values


def _graph(results: Results) -> tuple[Values, bool]:
    """A call of a graph against that of the same function in NumPy, with what PyTensor adds in one process."""
    rounds = results.get("small", {}).get("pytensor")
    if not rounds:
        raise NotMeasuredError("PyTensor is not installed, or small was not run")
    own = [entry["numpy"] + entry["pytensor, serial"] - entry["numpy, serial"] for entry in rounds]
    return [entry["pytensor"] / each for entry, each in zip(rounds, own)], False


def _above(case: str, way: str, other: str) -> Callable[[Results], tuple[Values, bool]]:
    """The microseconds of one way of the small calls above those of another one."""

    def values(results: Results) -> tuple[Values, bool]:
        cases = results.get("small", {"error": "not run"})
        if "error" in cases:
            raise NotMeasuredError(cases["error"])
        return [(entry[way] - entry[other]) * 1e6 for entry in cases[case] if way in entry], False

    return values


def _share(case: str) -> Callable[[Results], tuple[Values, bool]]:
    """The share of synk's call spent in the user's function, in the rounds against all peers."""

    def values(results: Results) -> tuple[Values, bool]:
        rounds_of(results, "calls", case, POOL.name)
        rounds = [entry for part in results["calls"]["jobs"][case].values() if isinstance(part, list) for entry in part]
        quiet = [entry for entry in rounds if not _noisy(results, [entry])]
        return [entry["synk"]["share"] for entry in quiet or rounds], not quiet

    return values


def _bandwidth(case: str) -> Callable[[Results], tuple[Values, bool]]:
    """The bandwidth of synk's collective as a share of that of one copy of the array."""

    def values(results: Results) -> tuple[Values, bool]:
        rounds = rounds_of(results, "collectives", case, MPI.name)
        return [entry["ideal"]["call_s"] / entry["synk"]["call_s"] for entry in rounds], _noisy(results, rounds)

    return values


def _startup(value: Callable[[Any], float]) -> Callable[[Results], tuple[Values, bool]]:
    def values(results: Results) -> tuple[Values, bool]:
        family = results.get("startup", {"error": "not run"})
        if "error" in family:
            raise NotMeasuredError(family["error"])
        return [value(entry) for entry in family["repetitions"]], _noisy(results, family["repetitions"])

    return values


def _footprint(value: Callable[[Any], float]) -> Callable[[Results], tuple[Values, bool]]:
    def values(results: Results) -> tuple[Values, bool]:
        family = results.get("footprint", {"error": "not run"})
        if "error" in family:
            raise NotMeasuredError(family["error"])
        return [value(family)], False

    return values


def _growth(process: Callable[[Any], Sequence[Any]]) -> Callable[[Any], float]:
    """Bytes of private memory by which the worst process grows for each byte of ``Data``."""

    def growth(family: Any) -> float:
        first, last = family["memory"]["sizes"][0], family["memory"]["sizes"][-1]
        pairs = zip(process(first), process(last), strict=True)
        private = max(after["private_nbytes"] - before["private_nbytes"] for before, after in pairs)
        return private / (last["data_nbytes"] - first["data_nbytes"])

    return growth


def _copies(family: Any) -> float:
    """Bytes of shared memory in master and workers together for each byte of ``Data``."""
    largest = family["memory"]["sizes"][-1]
    return largest["shared_nbytes"] / largest["data_nbytes"]


def _worst(key: str, scale: float = 1.0) -> Callable[[Any], float]:
    return lambda family: max(family["many_calls"][process][key] for process in ("master", "worker")) * scale


def _message(
    case: str, peer: str | None, scale: float = 1.0, family: str = "messages"
) -> Callable[[Results], tuple[Values, bool]]:
    """The time of one message or collective inside a function, against the peer's (None: itself)."""

    def values(results: Results) -> tuple[Values, bool]:
        rounds = rounds_of(results, family, case, peer or "alone")
        other = [entry[peer]["inner_s"] if peer else 1.0 for entry in rounds]
        return [entry["synk"]["inner_s"] * scale / each for entry, each in zip(rounds, other)], _noisy(results, rounds)

    return values


def _step_less_a_call(results: Results) -> tuple[Values, bool]:
    """What a step with an empty module costs above a plain call with the same body, in microseconds."""
    rounds = rounds_of(results, "training", "empty model", "plain call")
    above = [(entry["synk"]["call_s"] - entry["plain call"]["call_s"]) * 1e6 for entry in rounds]
    return above, _noisy(results, rounds)


def _memory(results: Results) -> tuple[Values, bool]:
    """The memory of one rank that trains, against that of one of DDP's."""
    rounds = rounds_of(results, "training", training.MEMORY, training.DDP.name)
    return [entry["synk"]["nbytes"] / entry[training.DDP.name]["nbytes"] for entry in rounds], False


BARS = (
    Bar("tiny call, warm: time / bare loop's", 2.2, 1.8, _to_best("tiny", BARE.name)),
    Bar("tiny call, cold: time / bare loop's", 1.35, 1.2, _to_best("tiny, cold", BARE.name)),
    Bar("tiny call: overhead / multiprocessing.Pool's", 0.12, 0.08, _overhead("tiny", POOL.name)),
    Bar("tiny call: overhead / torch gloo's", 0.25, 0.10, _overhead("tiny", GLOO.name)),
    Bar("tiny call: overhead / jax pmap's", 0.25, 0.17, _overhead("tiny", JAX.name)),
    Bar(
        "1.5 ms of work a shard: time outside / bare loop's",
        2.6, 2.0, _to_best("linear 1.5 ms", BARE.name, "outside_s"),
    ),
    Bar("1.5 ms of work a shard: share, best round", 0.90, 0.94, _best_share("linear 1.5 ms"), at_least=True),
    Bar("15 ms of work a shard: time outside / MPI's", 1.8, 1.3, _call("calls", "linear 15 ms", MPI.name, "outside_s")),
    Bar(
        "tiny call, submitted, three in flight / waited for",
        1.2, 0.8, _in_one_process("submitted", "tiny", "synk, submitted", "synk, waited for"),
    ),
    Bar(
        "tiny call with a shared variable / plain",
        1.8, 1.3, _in_one_process("small", "variable", "variable", "plain"),
    ),
    Bar("a graph of PyTensor / the NumPy function and PyTensor's own overhead", 1.2, 1.1, _graph),
    Bar(
        "100 repetitions of a call with an update / 100 calls",
        0.1, 0.08, _in_one_process("small", "repeat", "repeat(100)", "100 calls"),
    ),
    *(
        Bar(
            f"{count} arrays in a broadcast dict / the same divided by rows",
            1.2, 1.0, _in_one_process("small", "parameters", f"{count} whole", f"{count} by rows"),
        )
        for count in small.NUM_LEAVES
    ),
    Bar("an output that is a text / an array", 2, 1.5, _in_one_process("small", "outputs", "a text", "an array")),
    Bar(
        "a dict of 64 outputs / a tuple",
        1.2, 1.1, _in_one_process("small", "outputs", "a dict of 64", "a tuple of 64"),
    ),
    Bar("one array of 80 B captured: above nothing", 0.5, 0.3, _above("captured", "80 B", "nothing"), unit=" us"),
    Bar("ten arrays of 8 KB captured", 8, 6, _above("captured", "10 arrays of 8 KB", "nothing"), unit=" us"),
    Bar("an array of 100 MB captured", 6, 5, _above("captured", "100 MB", "nothing"), unit=" us"),
    Bar("400 tensors captured", 200, 100, _above("captured", "400 tensors", "nothing"), unit=" us"),
    Bar("a traced call: above a plain one, 2 ranks", 10, 6, _above("followed", "traced", "plain"), unit=" us"),
    Bar("tiny call, inline", 20, 14, _in_one_process("small", "inline", "inline", None, 1e6), unit=" us"),
    *(
        Bar(
            f"tiny call beside {number} busy processes{label}: default / never awake",
            must, 1.0, _in_one_process("small", f"beside {number} busy", f"default{p95}", f"never awake{p95}"),
        )
        for number in small.BUSY
        for label, p95, must in (("", "", 1.15), (", 95th percentile", " p95", 1.5))
    ),
    Bar("100 fits of 20 ms by joblib: synk / loky", 1.2, 1.0, _in_one_process("items", "fits", "synk", "loky")),
    Bar("20 000 tiny items: synk.map / joblib", 1.3, 0.8, _in_one_process("items", "tiny", "synk.map", "loky")),
    Bar("5 ms of work a shard: share in the function", 0.93, 0.96, _share("linear work"), at_least=True),
    Bar("50 ms of work a shard: share in the function", 0.98, 0.99, _share("work"), at_least=True),
    Bar("40 MB passed: call / MPI Scatter's", 1.0, 0.8, _call("calls", "linear passed", MPI.name)),
    Bar("40 MB passed: call / pickling Pool's", 0.10, 0.08, _call("calls", "linear passed", POOL.name)),
    Bar("64 MB averaged: overhead / MPI Allreduce's", 0.5, 0.42, _overhead("output 64 MB", MPI.name)),
    Bar("64 MB averaged: overhead / Pool's", 0.06, 0.03, _overhead("output 64 MB", POOL.name)),
    Bar("1 MB averaged: overhead / MPI Allreduce's", 1.0, 0.5, _overhead("output 1 MB", MPI.name)),
    Bar("1 MB averaged: overhead / bare publish and reduce's", 5, 4, _overhead("output 1 MB", BARE.name)),
    Bar(
        "fork to the first result / parallel imports of NumPy",
        1.15, 1.0, _startup(lambda entry: entry["first_result_s"] / entry["imports_numpy_s"]),
    ),
    Bar(
        "import synk beyond import numpy",
        0.1, 0.05, _startup(lambda entry: entry["import_synk_s"] - entry["import_numpy_s"]), unit=" s",
    ),
    Bar("idle worker", 0.2, 0.005, _footprint(lambda family: 100 * family["idle"]["0"]), unit=" % of a core"),
    Bar("control of a repeated call, down a worker", 64, 3, _footprint(lambda f: f["control"]["down"]), unit=" B"),
    Bar("worker's private memory a byte of Data", 0.01, 0.001, _footprint(_growth(lambda s: s["workers"])), unit=" B"),
    Bar("master's private memory a byte of Data", 0.01, 0.001, _footprint(_growth(lambda s: [s["master"]])), unit=" B"),
    Bar(
        "shared memory a byte of Data",
        1.01, 1.001, _footprint(_copies),
        unit=" B",
    ),
    Bar("many calls: growth of descriptors", 0, 0, _footprint(_worst("fds"))),
    Bar("many calls: growth of mappings", 0, 0, _footprint(_worst("mappings"))),
    Bar("many calls: growth of private memory", 1.0, 0.1, _footprint(_worst("private_nbytes", 2.0**-20)), unit=" MB"),
    *(
        Bar(f"training, {case}: step / DDP's", must, aim, _call("training", case, training.DDP.name))
        for case, must, aim in (
            ("cnn, 8 x 8 images", 0.8, 0.7),
            ("transformer of two blocks", 0.9, 0.7),
            ("18 MB of gradients", 0.8, 0.7),
            ("0.6 ms of work", 0.8, 0.7),
            ("DataParallel, transformer of two blocks", 1.3, 1.1),
            ("DataParallel, 0.6 ms of work", 1.6, 1.3),
        )
    ),
    Bar("training, 18 MB of gradients: memory of a rank / DDP's", 1.2, 1.0, _memory),
    Bar("training, a step with an empty model less a plain call", 150, 100, _step_less_a_call, unit=" us"),
    Bar("all_reduce of 64 MB: bandwidth / one copy's", 0.55, 0.85, _bandwidth("all_reduce 64 MB"), at_least=True),
    Bar("all_reduce of 64 MB: time / mpi4py's", 0.5, 0.4, _call("collectives", "all_reduce 64 MB", MPI.name)),
    Bar("all_reduce of 64 MB: time / gloo's", 0.5, 0.4, _call("collectives", "all_reduce 64 MB", GLOO.name)),
    Bar("comm.barrier: time / mpi4py's", 3.5, 2.5, _message("comm.barrier", MPI.name, family="collectives")),
    *(
        Bar(
            f"comm.{name} {size}: time / mpi4py's",
            must, aim, _message(f"comm.{name} {size}", MPI.name, family="collectives"),
        )
        for name in collectives.INSIDE
        for size, must, aim in (
            ("8 B", 3.5, 2.5), ("64 KB", 2, 1), ("1 MB", 1.5, 1), ("16 MB", 1.3, 1), ("64 MB", 1.0, 1)
        )
    ),
    *(
        Bar(f"message, {case}: time / mpi4py's", must, aim, _message(case, MPI.name))
        for case, must, aim in (
            ("half a round trip of 8 B", 3, 1),
            ("half a round trip of 1 MB", 1.5, 1),
            ("64 MB into an existing array", 1.3, 1),
            ("8 MB exchanged, 10 ms of work between", 1.2, 1.0),
            (messages.KALMAN, 1.12, 1.03),
        )
    ),
    Bar(f"{messages.KALMAN}: ordered / as written", 0.95, 0.92, _message(messages.KALMAN, messages.AS_WRITTEN.name)),
    Bar(
        "isend of 8 MB to a rank that sleeps",
        50, 10, _message("isend of 8 MB to a rank that sleeps", None, 1e3), unit=" ms",
    ),
    Bar("deadlock to its error", 1, 0.2, _message("deadlock to its error", None), unit=" s"),
)  # fmt: skip


def lines(results: Results) -> list[list[str]]:
    """Return the rows of the table of bars: quantity, must, aim, the bare loop's, median, range, verdict."""
    rows = []
    for bar in BARS:
        sign = ">=" if bar.at_least else "<="
        row = [bar.quantity, f"{sign} {bar.must:g}{bar.unit}", f"{bar.aim:g}"]
        try:
            values, noisy = bar.values(results)
        except NotMeasuredError as error:
            rows.append([*row, "", "", "", f"not measured: {error}"])
            continue
        median = statistics.median(values)
        verdict = bar.verdict(median) + (" (noisy)" if noisy else "")
        spread = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
        rows.append([*row, _floor(bar, results), f"{median:.3g}", spread, verdict])
    return rows


# Quantities of which the bare loop's own value is a part of the answer: case, peer and what is compared.
FLOORS = {
    "tiny call: overhead / multiprocessing.Pool's": ("tiny", POOL.name, "overhead"),
    "tiny call: overhead / torch gloo's": ("tiny", GLOO.name, "overhead"),
    "tiny call: overhead / jax pmap's": ("tiny", JAX.name, "overhead"),
    "1.5 ms of work a shard: share, best round": ("linear 1.5 ms", None, "share"),
    "15 ms of work a shard: time outside / MPI's": ("linear 15 ms", MPI.name, "outside_s"),
    "40 MB passed: call / MPI Scatter's": ("linear passed", MPI.name, "call_s"),
    "64 MB averaged: overhead / MPI Allreduce's": ("output 64 MB", MPI.name, "overhead"),
    "1 MB averaged: overhead / MPI Allreduce's": ("output 1 MB", MPI.name, "overhead"),
}


def _floor(bar: Bar, results: Results) -> str:
    """Return what the bare loop reaches of a quantity in the same run."""
    if bar.quantity not in FLOORS:
        return ""
    case, peer, quantity = FLOORS[bar.quantity]

    def values(name: str) -> Values:
        entries = rounds_of(results, "calls", case, name)
        if quantity == "overhead":
            return [entry[name]["call_s"] - entry["ideal"]["call_s"] for entry in entries]
        return [entry[name][quantity] for entry in entries]

    try:
        if peer is None:
            return f"{max(values(BARE.name)):.3g}"
        return f"{statistics.median(values(BARE.name)) / statistics.median(values(peer)):.3g}"
    except NotMeasuredError:
        return ""
