"""Settings of scikit-learn, xarray, SciPy and mpmath hold on the ranks as where the call stands: around it, inside of
the function, in both places, after a block, with restarts in between. The oracle is the plain function.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import synk

X = np.arange(4.0)


class Case(NamedTuple):
    """``body`` shows what a setting does; ``contexts`` set values of it."""

    library: str
    body: Callable[[], Any]
    contexts: tuple[tuple[str, dict[str, Any] | int], ...]


def outcome(body: Callable[[], Any]) -> str:
    """Return what a body returns, or the kind of what it raises."""
    try:
        return str(body())
    except Exception as error:
        return type(error).__name__


def scaled() -> Any:
    from sklearn.preprocessing import StandardScaler

    return type(StandardScaler().fit_transform([[1.0], [2.0]])).__name__


def checked() -> Any:
    from sklearn.utils import check_array

    return check_array(np.array([[np.inf]]))


def joined() -> Any:
    import xarray

    first, second = (xarray.DataArray([1.0, 2.0], dims="t", coords={"t": [k, k + 1]}) for k in (0, 1))
    return (first + second).sizes["t"]


def attributes() -> Any:
    import xarray

    return xarray.DataArray([1.0, 2.0], attrs={"units": "m"}).mean().attrs


def singular() -> Any:
    from scipy import special

    return special.gammaln(0.0)


def out_of_domain() -> Any:
    from scipy import special

    return special.spence(-1.0)


def third() -> Any:
    import mpmath

    return mpmath.mpf(1) / 3


def enclosed() -> Any:
    import mpmath

    return mpmath.iv.mpf(1) / 3


CASES = {
    "transform_output": Case(
        "sklearn", scaled, (("config_context", {"transform_output": "pandas"}), ("config_context", {"display": "text"}))
    ),
    "assume_finite": Case(
        "sklearn", checked, tuple(("config_context", {"assume_finite": value}) for value in (True, False))
    ),
    "arithmetic_join": Case(
        "xarray", joined, tuple(("set_options", {"arithmetic_join": value}) for value in ("outer", "left", "exact"))
    ),
    "keep_attrs": Case("xarray", attributes, tuple(("set_options", {"keep_attrs": value}) for value in (True, False))),
    "singular": Case(
        "scipy.special", singular, tuple(("errstate", {"singular": each}) for each in ("raise", "ignore"))
    ),
    "domain": Case("scipy.special", out_of_domain, (("errstate", {"domain": "raise"}), ("errstate", {"all": "raise"}))),
    "digits": Case("mpmath", third, (("workdps", 50), ("workdps", 3))),
    "bits": Case("mpmath", third, (("workprec", 100), ("extraprec", 7))),
    "bits of intervals": Case("mpmath", enclosed, (("iv", 20), ("iv", 140))),
}
PLACES = ("around", "inside", "both", "after", "around two")
VERBS: dict[str, Callable[[Any, Callable[[Any], str]], list[str]]] = {
    "call": lambda rt, body: rt.function(body, outputs=None)(X),
    "called again": lambda rt, body: [call(X) for call in [rt.function(body, outputs=None)] * 3][-1],
    "serial": lambda rt, body: [rt.function(body, outputs=None).serial(X)[0]],
    "submit": lambda rt, body: rt.function(body, outputs=None).submit(X).result(),
    "stream": lambda rt, body: list(itertools.chain(*rt.function(body, outputs=None).stream([X, X]))),
    "map": lambda rt, body: list(rt.map(body, [1.0, 2.0, 3.0])),
    "map in chunks": lambda rt, body: list(rt.map(body, [1.0, 2.0, 3.0], batch_size=2)),
}


@contextlib.contextmanager
def interval_bits(bits: int) -> Iterator[None]:
    import mpmath

    before, mpmath.iv.prec = mpmath.iv.prec, bits
    try:
        yield
    finally:
        mpmath.iv.prec = before


def opened(library: str, context: tuple[str, Any]) -> Any:
    """Return a block in which a setting holds."""
    name, value = context
    make: Any = interval_bits if name == "iv" else getattr(importlib.import_module(library), name)
    return make(**value) if isinstance(value, dict) else make(value)


def try_each(rt: synk.Runtime, combinations: list[tuple[str, str, str, str]], rng: random.Random) -> None:
    """Compare each combination with the plain function; at the end name those that differ."""
    wrong = []
    for name, place, verb, before in combinations:
        library, body, contexts = CASES[name]
        own, other = rng.sample(contexts, 2)
        inner = other if place == "both" else own

        def shown(x: Any, place: str = place, library: str = library, body: Any = body, inner: Any = inner) -> str:
            if place not in ("inside", "both"):
                return outcome(body)
            with opened(library, inner):
                within = outcome(body)
            return f"{within}, then {outcome(body)}"

        if before == "restart":
            rt.restart()
        with contextlib.ExitStack() as blocks:
            if place != "inside":
                blocks.enter_context(opened(library, own))
            if place == "around two":
                blocks.enter_context(opened(library, other))
            if place == "after":
                VERBS["call"](rt, shown)
                blocks.close()
            expected, got = shown(1.0), VERBS[verb](rt, shown)
        if set(got) != {expected}:
            wrong.append(f"{name}, {place}, {verb} after {before}, {own}: {got}, expected {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def libraries() -> set[str]:
    """The libraries that are installed, imported by now."""
    found = set()
    for library in sorted({case.library for case in CASES.values()}):
        with contextlib.suppress(ModuleNotFoundError):
            found.add(importlib.import_module(library).__name__)
    return found


def test_settings_hold_where_the_call_stands(reused: Any, libraries: set[str]) -> None:
    """Each setting twice, with all places and verbs; in the middle the workers are new."""
    rng = random.Random(1)
    names = 2 * [name for name in CASES if CASES[name].library in libraries]
    places, verbs = (itertools.cycle(rng.sample(list(each), len(each))) for each in (PLACES, VERBS))
    befores = {len(names) // 2: "restart"}
    chosen = [(name, next(places), next(verbs), befores.get(number, "nothing")) for number, name in enumerate(names)]
    try_each(reused(2), chosen, rng)


@pytest.mark.storm
@pytest.mark.parametrize("name", CASES)
def test_all_of_them(reused: Any, name: str) -> None:
    pytest.importorskip(CASES[name].library)
    pairs = enumerate(itertools.product(PLACES, VERBS))
    chosen = [(name, *pair, "restart" if number == 17 else "nothing") for number, pair in pairs]
    try_each(reused(2), chosen, random.Random(name))


def test_what_a_function_sets_and_verify(reused: Any, libraries: set[str]) -> None:
    """It stays on its rank, until the program changes that setting; ``verify`` leaves it as it was."""
    import mpmath

    rt = reused(1)

    def careless(x: Any) -> float:
        mpmath.mp.dps = 9
        return float(x.sum())

    digits = rt.function(lambda x: mpmath.mp.dps, outputs="first")
    assert rt.function(careless, outputs="sum").verify(X)
    assert digits(X) == mpmath.mp.dps == 15
    rt.function(careless, outputs="sum")(X)
    assert (digits(X), mpmath.mp.dps) == (9, 15)
    with mpmath.workdps(30):
        assert digits(X) == 30
    assert digits(X) == 15


def test_nothing_is_imported_for_a_setting(runtime: Any, libraries: set[str]) -> None:
    """What the program has imported is not imported on a worker; what a function imports there finds its settings."""
    import mpmath

    def loaded(x: Any) -> str:
        import sys

        return str([name for name in ("sklearn", "xarray", "scipy.special") if name in sys.modules])

    with mpmath.workdps(40):
        rt = runtime(1)
        assert rt.function(loaded, outputs=None)(X) == ["[]"]
        assert list(rt.map(lambda x: outcome(third), [1.0])) == [outcome(third)]
