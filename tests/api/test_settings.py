"""Settings of libraries hold on the ranks as they hold where the call stands. The oracle is the plain function."""

from __future__ import annotations

import contextlib
import decimal
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import harness
from support.tables import combinations

import synk

torch = pytest.importorskip("torch")

X = np.arange(4.0)


class OwnWarning(UserWarning):
    """Of this module."""


class Case(NamedTuple):
    """``body`` shows what a setting does; ``set`` sets a value of it, and ``values`` are some, the usual one first."""

    body: Callable[[], Any]
    set: Callable[[Any], Any]
    values: tuple[Any, ...]


def outcome(body: Callable[[], Any]) -> Any:
    """Return what a body returns, or the kind of what it raises."""
    try:
        return body()
    except Exception as error:
        return type(error).__name__


def divided() -> Any:
    return str(np.float64(1.0) / np.float64(0.0))


def overflown() -> Any:
    return str(np.float32(1e38) * np.float32(1e38))


def in_decimal() -> Any:
    return str(decimal.Decimal(1) / decimal.Decimal(7))


def trapped() -> Any:
    return str(decimal.Decimal(1) / decimal.Decimal(0))


def set_decimal(change: Callable[[decimal.Context], Any]) -> None:
    context = decimal.DefaultContext.copy()
    change(context)
    decimal.setcontext(context)


def deep(depth: int = 0) -> Any:
    try:
        return deep(depth + 1)
    except RecursionError:
        return depth // 500  # the frames above are some more, or fewer


def warned() -> Any:
    with contextlib.redirect_stderr(open(os.devnull, "w")) as stream, stream:
        warnings.warn("told", OwnWarning, stacklevel=1)
    return "no error"


def has_grad() -> Any:
    weight = torch.ones(2, requires_grad=True)
    return (weight * 2).requires_grad


def default_dtype() -> Any:
    return str(torch.ones(2).sum().dtype)


def is_deterministic() -> Any:
    return f"{torch.are_deterministic_algorithms_enabled()} {torch.is_deterministic_algorithms_warn_only_enabled()}"


def flags_of_cudnn() -> Any:
    from torch.backends import cudnn

    return cudnn.deterministic, cudnn.benchmark


def set_cudnn(flags: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


def library(name: str) -> Any:
    return importlib.import_module(name)


def checked() -> Any:
    from sklearn.utils import check_array

    return str(check_array(np.array([[np.inf]])))


def joined() -> Any:
    import xarray

    first, second = (xarray.DataArray([1.0, 2.0], dims="t", coords={"t": [k, k + 1]}) for k in (0, 1))
    return (first + second).sizes["t"]


def singular() -> Any:
    from scipy import special

    return str(special.gammaln(0.0))


def third() -> Any:
    import mpmath

    return str(mpmath.mpf(1) / 3)


def enclosed() -> Any:
    import mpmath

    return str(mpmath.iv.mpf(1) / 3)


CASES = {
    "np.seterr": Case(divided, lambda how: np.seterr(divide=how), ("ignore", "raise", "ignore")),
    "np.seterr of overflow": Case(overflown, lambda how: np.seterr(over=how), ("ignore", "raise")),
    "decimal precision": Case(in_decimal, lambda prec: set_decimal(lambda c: setattr(c, "prec", prec)), (28, 5, 50)),
    "decimal rounding": Case(
        in_decimal, lambda how: set_decimal(lambda c: setattr(c, "rounding", how)), ("ROUND_HALF_EVEN", "ROUND_UP")
    ),
    "decimal traps": Case(
        trapped,
        lambda flag: set_decimal(lambda c: c.traps.__setitem__(decimal.DivisionByZero, flag)),
        (True, False),
    ),
    "recursion limit": Case(deep, sys.setrecursionlimit, (3000, 6000, 4500)),
    "warning filters": Case(warned, lambda action: warnings.simplefilter(action, OwnWarning), ("ignore", "error")),
    "grad mode": Case(has_grad, torch.set_grad_enabled, (True, False)),
    "default dtype": Case(default_dtype, torch.set_default_dtype, (torch.float32, torch.float64)),
    "deterministic algorithms": Case(
        is_deterministic, torch.set_deterministic_debug_mode, ("default", "error", "warn")
    ),
    "matmul precision": Case(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest", "high", "medium")
    ),
    "cuDNN": Case(flags_of_cudnn, set_cudnn, ((False, False), (True, False), (False, True))),
    "sklearn": Case(checked, lambda flag: library("sklearn").set_config(assume_finite=flag), (False, True)),
    "xarray": Case(
        joined, lambda how: library("xarray").set_options(arithmetic_join=how), ("inner", "outer", "left", "exact")
    ),
    "scipy.special": Case(singular, lambda how: library("scipy.special").seterr(singular=how), ("ignore", "raise")),
    "mpmath": Case(third, lambda digits: setattr(library("mpmath").mp, "dps", digits), (15, 50, 3)),
    "mpmath, intervals": Case(enclosed, lambda bits: setattr(library("mpmath").iv, "prec", bits), (53, 20, 140)),
}
OF_LIBRARIES = [name for name in CASES if name.startswith(("sklearn", "xarray", "scipy", "mpmath"))]
for _name in ("sklearn", "xarray", "scipy.special", "mpmath"):
    if importlib.util.find_spec(_name.partition(".")[0]) is None:
        CASES = {name: case for name, case in CASES.items() if not name.startswith(_name)}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Put back all that the cases set, in this thread."""
    limit = sys.getrecursionlimit()
    with warnings.catch_warnings(), np.errstate(), decimal.localcontext():
        yield
    sys.setrecursionlimit(limit)
    for name in [*CASES][[*CASES].index("grad mode") :]:
        CASES[name].set(CASES[name].values[0])


@pytest.mark.parametrize("count", [len(CASES), pytest.param(3 * len(CASES), marks=pytest.mark.storm)])
def test_each_verb_computes_with_the_settings_of_its_place(
    shared_runtimes: Any, subtests: pytest.Subtests, count: int
) -> None:
    """A submitted call has those of its submission."""
    for name, kind in combinations(count, CASES, (1, 2, 0)):
        if name in OF_LIBRARIES:
            kind = 1  # an import takes longer than all calls
        with subtests.test(name, kind=kind), ThreadPoolExecutor(1) as pool:
            rt, case = shared_runtimes[kind], CASES[name]
            body, num_ranks = case.body, rt.world_size
            f = rt.function(lambda x, body=body: outcome(body), outputs=None)
            submitted, expected = [], []
            for value in (*case.values, *case.values):
                case.set(value)
                plain = outcome(body)
                for _ in range(5):  # the last of them are quiet ones
                    assert f(X) == [plain] * num_ranks
                assert f.serial(X)[0] == plain
                assert list(rt.map(lambda x, body=body: outcome(body), [1.0, 2.0])) == [plain] * 2
                assert list(f.stream([X, X])) == [[plain] * num_ranks] * 2
                expected.append([plain] * num_ranks)
                submitted.append(f.submit(X))
                pending, plains = pool.submit(lambda f=f, body=body: (f.submit(X), outcome(body))).result()
                expected.append([plains] * num_ranks)  # some belong to a thread, others to the process
                submitted.append(pending)
            assert [call.result() for call in submitted] == expected


def test_quiet_calls_stay_quiet_within_blocks_of_equal_settings(rt: Any) -> None:
    """A new block of settings that are equal to those before is no news; one of others is, and its end."""
    f, before = rt.function(lambda x: x.sum() + 0 * len(CASES), outputs="sum"), 0
    grad = rt.function(lambda x: has_grad(), outputs=None)
    for _ in range(2):
        assert grad(X) == [True] * 2
        with torch.inference_mode():
            assert grad(X) == [False] * 2
    for call in range(8):
        if call == 3:
            before = rt.counters["bytes_down"]
        with np.errstate(all="ignore"), decimal.localcontext(), warnings.catch_warnings(), torch.no_grad():
            assert f(X) == X.sum()
    assert rt.counters["bytes_down"] - before == 5 * 2 * 8, "doorbells alone"


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_new_workers_have_them_and_so_have_those_that_take_their_places(runtime: Callable[..., Any]) -> None:
    slow = ("sklearn", "xarray")  # to import, which each of the three workers does
    bodies = [case.body for name, case in CASES.items() if case.body is not in_decimal and name not in slow]
    for case in CASES.values():
        case.set(case.values[1])

    def every() -> str:
        return repr([outcome(body) for body in bodies])

    rt = runtime(1)
    f = rt.function(lambda x: every(), outputs=None)
    assert f(X) == [every()]
    harness.kill_and_wait(*harness.pids(rt))
    for _ in range(4):
        assert f(X) == [every()]
    rt.restart()
    assert f(X) == [every()]


def test_what_a_function_sets_stays_on_its_rank_until_the_program_changes_it(runtime: Callable[..., Any]) -> None:
    rt = runtime(1)
    np.seterr(divide="ignore", over="ignore")
    torch.set_default_dtype(torch.float32)

    def change(x: Any) -> Any:
        np.seterr(divide="raise")
        torch.set_default_dtype(torch.float64)
        return 0.0

    look = rt.function(lambda x: (outcome(divided), default_dtype()), outputs=None)
    assert look(X) == [("inf", "torch.float32")]
    rt.function(change)(X)
    for _ in range(4):
        assert look(X) == [("FloatingPointError", "torch.float64")]
    assert (outcome(divided), default_dtype()) == ("inf", "torch.float32"), "the program's own are as they were"
    np.seterr(over="raise")
    assert look(X) == [("inf", "torch.float64")], "the setting that the program has changed, and no other"


def test_verify_compares_under_the_settings_of_the_call_and_leaves_them(rt: Any) -> None:
    tenth = rt.function(lambda x: np.float64(torch.full((1,), 0.1).double()[0].item() + 0 * x.sum()))
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        assert tenth.verify(X, rtol=1e-15)

    def change(x: Any) -> Any:
        np.seterr(divide="raise")
        decimal.getcontext().prec = 3
        torch.set_default_dtype(torch.float64)
        return x.mean()

    np.seterr(divide="ignore")
    look = rt.function(lambda x: (outcome(divided), outcome(in_decimal), default_dtype()), outputs=None)
    expected = look(X)
    assert rt.function(change).verify(X)
    assert look(X) == expected
    assert (outcome(divided), outcome(in_decimal), default_dtype()) == expected[0]


def test_functions_are_loaded_where_warnings_are_errors(
    shared_runtimes: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has imported the module before, without an error."""
    (tmp_path / "warns_at_import.py").write_text(
        "import warnings\nwarnings.warn('old', DeprecationWarning)\nvalue = 3.0\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    warnings.simplefilter("ignore")
    import warns_at_import

    warnings.simplefilter("error")
    f = shared_runtimes[2].function(lambda x: warns_at_import.value + 0 * x.sum())
    assert f(X) == warns_at_import.value


@pytest.mark.own_start
def test_libraries_that_a_rank_imports_later(runtime: Callable[..., Any]) -> None:
    """Nothing is imported for a setting, and it holds as soon as the library is there; also for a class of no module.

    After one backend has a precision of its own torch refuses to read the one of all: a call goes on with that it had.
    """
    from scipy.sparse import SparseEfficiencyWarning

    class Own(UserWarning):
        pass

    def names(x: Any) -> Any:
        return [name in sys.modules for name in ("torch", "scipy.sparse")]

    def late(x: Any) -> Any:
        import torch as library

        return str(library.ones(1).dtype), str(decimal.Decimal(1) / 3)

    def warned(x: Any) -> Any:
        from scipy.sparse import SparseEfficiencyWarning as Slow

        said = []
        for kind in (Slow, Own):
            try:
                warnings.warn("told", kind, stacklevel=1)
            except kind:
                said.append(kind.__name__)
        return said

    torch.set_default_dtype(torch.float64)
    decimal.getcontext().prec = 4
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", SparseEfficiencyWarning)
    rt = runtime(1)
    f, g, h = (rt.function(fn, outputs=None) for fn in (names, late, warned))
    assert (f(X), g(X), h(X)) == ([[False, False]], [late(X)], [["Own"]])
    warnings.simplefilter("error", SparseEfficiencyWarning)
    warnings.simplefilter("ignore", Own)
    assert (g(X), h(X)) == ([("torch.float64", "0.3333")], [["SparseEfficiencyWarning"]])
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert [g(X) for _ in range(4)] == [[late(X)]] * 4
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


def test_steps_of_training_have_the_grad_mode_of_their_call(shared_runtimes: Any) -> None:
    """And the dtype: tests/training/test_replicate.py."""
    rep, x = synk.torch.replicate(torch.nn.Linear(1, 1), runtime=shared_runtimes[2]), torch.ones(4, 1)
    step = rep.function(lambda model, x: (model.weight * 2).requires_grad, outputs=None)
    assert step(x) == [True] * 2
    with torch.no_grad():
        assert step(x) == step.submit(x).result() == [False] * 2


def test_64_bits_of_jax(shared_runtimes: Any) -> None:
    jax = pytest.importorskip("jax")

    def total(x: Any) -> Any:
        return str(jax.numpy.ones(2).dtype)

    f = shared_runtimes[1].function(total, outputs=None)
    before = jax.config.jax_enable_x64
    try:
        for value in (False, True, False):
            jax.config.update("jax_enable_x64", value)
            assert f(X) == [total(X)]
    finally:
        jax.config.update("jax_enable_x64", before)
