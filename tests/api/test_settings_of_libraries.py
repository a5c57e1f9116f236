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
from support.tables import combinations

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


def checked() -> Any:
    from sklearn.utils import check_array

    return check_array(np.array([[np.inf]]))


def joined() -> Any:
    import xarray

    first, second = (xarray.DataArray([1.0, 2.0], dims="t", coords={"t": [k, k + 1]}) for k in (0, 1))
    return (first + second).sizes["t"]


def singular() -> Any:
    from scipy import special

    return special.gammaln(0.0)


def third() -> Any:
    import mpmath

    return mpmath.mpf(1) / 3


def enclosed() -> Any:
    import mpmath

    return mpmath.iv.mpf(1) / 3


CASES = {
    "assume_finite": Case(
        "sklearn", checked, tuple(("config_context", {"assume_finite": value}) for value in (True, False))
    ),
    "arithmetic_join": Case(
        "xarray", joined, tuple(("set_options", {"arithmetic_join": value}) for value in ("outer", "left", "exact"))
    ),
    "singular": Case(
        "scipy.special", singular, tuple(("errstate", {"singular": each}) for each in ("raise", "ignore"))
    ),
    "digits": Case("mpmath", third, (("workdps", 50), ("workdps", 3), ("workprec", 100), ("extraprec", 7))),
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


@pytest.fixture
def libraries() -> set[str]:
    """The libraries that are installed, imported by now."""
    found = set()
    for library in sorted({case.library for case in CASES.values()}):
        with contextlib.suppress(ModuleNotFoundError):
            found.add(importlib.import_module(library).__name__)
    return found


def test_settings_hold_where_the_call_stands(reused: Any, libraries: set[str], subtests: pytest.Subtests) -> None:
    """In the middle the workers are new."""
    rt, rng = reused(2), random.Random(1)
    names = [name for name in CASES if CASES[name].library in libraries]
    for number, (place, verb, name) in enumerate(combinations(30, PLACES, VERBS, names)):
        library, body, contexts = CASES[name]
        own, other = rng.sample(contexts, 2)
        inner = other if place == "both" else own

        def shown(x: Any, place: str = place, library: str = library, body: Any = body, inner: Any = inner) -> str:
            if place not in ("inside", "both"):
                return outcome(body)
            with opened(library, inner):
                within = outcome(body)
            return f"{within}, then {outcome(body)}"

        if number == 15:
            rt.restart()
        with subtests.test(name=name, place=place, verb=verb, own=own), contextlib.ExitStack() as blocks:
            if place != "inside":
                blocks.enter_context(opened(library, own))
            if place == "around two":
                blocks.enter_context(opened(library, other))
            if place == "after":
                VERBS["call"](rt, shown)
                blocks.close()
            expected, got = shown(1.0), VERBS[verb](rt, shown)
            assert set(got) == {expected}
