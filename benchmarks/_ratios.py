"""Ratios to a peer or a limit in the same run, and how each follows from the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import collectives, messages, small, training
from benchmarks._harness import BARE, GLOO, JAX, MPI, POOL

Results = dict[str, Any]
Values = list[float]


class NotMeasuredError(LookupError):
    """A number is not in the results; the message says why."""


class Ratio(NamedTuple):
    """One line of the table.

    Attributes
    ----------
    quantity : str
    values : callable
        Results to one value a round (and whether any of them was noisy).
    unit : str
        Empty for a ratio.
    """

    quantity: str
    values: Callable[[Results], tuple[Values, bool]]
    unit: str = ""


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


RATIOS = (
    Ratio("tiny call, warm: time / bare loop's", _to_best("tiny", BARE.name)),
    Ratio("tiny call, cold: time / bare loop's", _to_best("tiny, cold", BARE.name)),
    Ratio("tiny call: overhead / multiprocessing.Pool's", _overhead("tiny", POOL.name)),
    Ratio("tiny call: overhead / torch gloo's", _overhead("tiny", GLOO.name)),
    Ratio("tiny call: overhead / jax pmap's", _overhead("tiny", JAX.name)),
    Ratio("1.5 ms of work a shard: time outside / bare loop's", _to_best("linear 1.5 ms", BARE.name, "outside_s")),
    Ratio("1.5 ms of work a shard: share, best round", _best_share("linear 1.5 ms")),
    Ratio("15 ms of work a shard: time outside / MPI's", _call("calls", "linear 15 ms", MPI.name, "outside_s")),
    Ratio(
        "tiny call, submitted, three in flight / waited for",
        _in_one_process("submitted", "tiny", "synk, submitted", "synk, waited for"),
    ),
    Ratio("tiny call with a shared variable / plain", _in_one_process("small", "variable", "variable", "plain")),
    Ratio("a graph of PyTensor / the NumPy function and PyTensor's own overhead", _graph),
    Ratio(
        "100 repetitions of a call with an update / 100 calls",
        _in_one_process("small", "repeat", "repeat(100)", "100 calls"),
    ),
    *(
        Ratio(
            f"{count} arrays in a broadcast dict / the same divided by rows",
            _in_one_process("small", "parameters", f"{count} whole", f"{count} by rows"),
        )
        for count in small.NUM_LEAVES
    ),
    Ratio("an output that is a text / an array", _in_one_process("small", "outputs", "a text", "an array")),
    Ratio("a dict of 64 outputs / a tuple", _in_one_process("small", "outputs", "a dict of 64", "a tuple of 64")),
    Ratio("one array of 80 B captured: above nothing", _above("captured", "80 B", "nothing"), " us"),
    Ratio("ten arrays of 8 KB captured", _above("captured", "10 arrays of 8 KB", "nothing"), " us"),
    Ratio("an array of 100 MB captured", _above("captured", "100 MB", "nothing"), " us"),
    Ratio("400 tensors captured", _above("captured", "400 tensors", "nothing"), " us"),
    Ratio("a traced call: above a plain one, 2 ranks", _above("followed", "traced", "plain"), " us"),
    Ratio("tiny call, inline", _in_one_process("small", "inline", "inline", None, 1e6), " us"),
    *(
        Ratio(
            f"tiny call beside {number} busy processes{label}: default / never awake",
            _in_one_process("small", f"beside {number} busy", f"default{p95}", f"never awake{p95}"),
        )
        for number in small.BUSY
        for label, p95 in (("", ""), (", 95th percentile", " p95"))
    ),
    Ratio("100 fits of 20 ms by joblib: synk / loky", _in_one_process("items", "fits", "synk", "loky")),
    Ratio("20 000 tiny items: synk.map / joblib", _in_one_process("items", "tiny", "synk.map", "loky")),
    Ratio("5 ms of work a shard: share in the function", _share("linear work")),
    Ratio("50 ms of work a shard: share in the function", _share("work")),
    Ratio("40 MB passed: call / MPI Scatter's", _call("calls", "linear passed", MPI.name)),
    Ratio("40 MB passed: call / pickling Pool's", _call("calls", "linear passed", POOL.name)),
    Ratio("64 MB averaged: overhead / MPI Allreduce's", _overhead("output 64 MB", MPI.name)),
    Ratio("64 MB averaged: overhead / Pool's", _overhead("output 64 MB", POOL.name)),
    Ratio("1 MB averaged: overhead / MPI Allreduce's", _overhead("output 1 MB", MPI.name)),
    Ratio("1 MB averaged: overhead / bare publish and reduce's", _overhead("output 1 MB", BARE.name)),
    Ratio(
        "fork to the first result / parallel imports of NumPy",
        _startup(lambda entry: entry["first_result_s"] / entry["imports_numpy_s"]),
    ),
    Ratio(
        "import synk beyond import numpy",
        _startup(lambda entry: entry["import_synk_s"] - entry["import_numpy_s"]),
        " s",
    ),
    Ratio("idle worker", _footprint(lambda family: 100 * family["idle"]["0"]), " % of a core"),
    Ratio("control of a repeated call, down a worker", _footprint(lambda f: f["control"]["down"]), " B"),
    Ratio("worker's private memory a byte of Data", _footprint(_growth(lambda s: s["workers"])), " B"),
    Ratio("program's private memory a byte of Data", _footprint(_growth(lambda s: [s["master"]])), " B"),
    Ratio("shared memory a byte of Data", _footprint(_copies), " B"),
    Ratio("many calls: growth of descriptors", _footprint(_worst("fds"))),
    Ratio("many calls: growth of mappings", _footprint(_worst("mappings"))),
    Ratio("many calls: growth of private memory", _footprint(_worst("private_nbytes", 2.0**-20)), " MB"),
    *(
        Ratio(f"training, {case}: step / DDP's", _call("training", case, training.DDP.name))
        for case in (
            "cnn, 8 x 8 images",
            "transformer of two blocks",
            "18 MB of gradients",
            "0.6 ms of work",
            "DataParallel, transformer of two blocks",
            "DataParallel, 0.6 ms of work",
        )
    ),
    Ratio("training, 18 MB of gradients: memory of a rank / DDP's", _memory),
    Ratio("training, a step with an empty model less a plain call", _step_less_a_call, " us"),
    Ratio("all_reduce of 64 MB: bandwidth / one copy's", _bandwidth("all_reduce 64 MB")),
    Ratio("all_reduce of 64 MB: time / mpi4py's", _call("collectives", "all_reduce 64 MB", MPI.name)),
    Ratio("all_reduce of 64 MB: time / gloo's", _call("collectives", "all_reduce 64 MB", GLOO.name)),
    Ratio("comm.barrier: time / mpi4py's", _message("comm.barrier", MPI.name, family="collectives")),
    *(
        Ratio(f"comm.{name} {size}: time / mpi4py's", _message(f"comm.{name} {size}", MPI.name, family="collectives"))
        for name in collectives.INSIDE
        for size in ("8 B", "64 KB", "1 MB", "16 MB", "64 MB")
    ),
    *(
        Ratio(f"message, {case}: time / mpi4py's", _message(case, MPI.name))
        for case in (
            "half a round trip of 8 B",
            "half a round trip of 64 KB",
            "half a round trip of 1 MB",
            "64 MB into an existing array",
            "8 MB exchanged, 10 ms of work between",
            messages.KALMAN,
        )
    ),
    Ratio(f"{messages.KALMAN}: ordered / as written", _message(messages.KALMAN, messages.AS_WRITTEN.name)),
    Ratio("isend of 8 MB to a rank that sleeps", _message("isend of 8 MB to a rank that sleeps", None, 1e3), " ms"),
    Ratio("deadlock to its error", _message("deadlock to its error", None), " s"),
)


def lines(results: Results) -> list[list[str]]:
    """Return the rows of the table of ratios: quantity, median, range."""
    rows = []
    for quantity, measure, unit in RATIOS:
        try:
            values, is_noisy = measure(results)
        except NotMeasuredError as error:
            rows.append([quantity, "", f"not measured: {error}"])
            continue
        spread = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
        rows.append([quantity, f"{statistics.median(values):.3g}{unit}", spread + " (noisy)" * is_noisy])
    return rows
