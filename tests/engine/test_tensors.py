"""torch's tensors as arguments and results. The oracle is the function itself on the whole tensors, and torch."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import told
from support.tables import named, seeds

torch = pytest.importorskip("torch")

WHERE = (1, 2, 3, 0)
X = np.zeros(4)
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def numbers(dtype: str, *shape: int) -> Any:
    """Return a tensor of small numbers."""
    values = np.random.default_rng(sum(shape)).integers(0, 9, shape)
    wide = torch.tensor(values).to(torch.complex64 if "complex" in dtype else torch.float32)
    return wide.to(getattr(torch, dtype))


def picked(tensor: Any, rows: list[int]) -> Any:
    return torch.stack([tensor[row] for row in rows])


def assert_same(got: Any, expected: Any) -> None:
    assert told(got) == told(expected)


# -- there and back ---------------------------------------------------------------------------------------------------


def test_every_dtype_there_and_back(shared_runtimes: Any, subtests: Any) -> None:
    functions = {
        where: shared_runtimes[where].function(
            lambda w, x: (x, w), bcast_inputs="w", outputs=("gather", "first"), framework="torch"
        )
        for where in WHERE
    }
    cases = list(itertools.product(DTYPES, WHERE, (1, 7), ("call", "submit", "serial", "slices", "picked", "reversed")))
    for dtype, where, rows, verb in random.Random(0).sample(cases, 80):
        x, w, f = numbers(dtype, rows, 3), numbers(dtype, 4), functions[where]
        with subtests.test(dtype=dtype, where=where, rows=rows, verb=verb):
            call, expected = {
                "call": (f, x),
                "submit": (lambda w, x, f=f: f.submit(w, x).result(), x),
                "serial": (f.serial, x),
                "slices": (lambda w, x, f=f: f(w, x, num_slices=3), x),
                "picked": (lambda w, x, f=f: f(w, x, batch=[0, -1, 0]), picked(x, [0, -1, 0])),
                "reversed": (lambda w, x, f=f: f(w, x, batch=slice(None, None, -2)), picked(x, [*range(rows)][::-2])),
            }[verb]
            for _ in range(2):
                assert_same(call(w, x), (expected, w))
    for dtype in DTYPES:
        with subtests.test(dtype=dtype, rows=0):
            gather = shared_runtimes[2].function(lambda x: x, outputs="gather", framework="torch")
            assert_same(gather(numbers(dtype, 0, 3)), numbers(dtype, 0, 3))


LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.T,
    lambda x: x[::2],
    lambda x: x[:, 1:],
    lambda x: x[:1].expand(6, 4),
    lambda x: torch.flip(x, [0]),
    lambda x: x[2:4],
    lambda x: x.reshape(4, 3, 2).permute(2, 0, 1),
    lambda x: torch.complex(x, x).conj(),
    lambda x: torch.complex(x, x).conj().imag,
    lambda x: x[:, 0],
    lambda x: x[:, :0],
    lambda x: torch.nn.Parameter(x, requires_grad=False),
)


def test_any_strides_and_lazy_values(shared_runtimes: Any, subtests: Any) -> None:
    f = shared_runtimes[2].function(
        lambda w, x: (x * 2, w * 2), bcast_inputs="w", outputs=("gather", "first"), framework="torch"
    )
    for number, make in enumerate(LAYOUTS):
        x = make(torch.arange(24.0).reshape(6, 4))
        for value in (x, x.bfloat16()) if not x.is_complex() else (x,):
            with subtests.test(layout=number, dtype=str(value.dtype)):
                for got in f(value, value):
                    assert torch.equal(got, value.detach() * 2)


ROUNDED = list(itertools.product(["float16", "float32", "bfloat16"], ["avg", "sum"], [1, 100_000], [True, False]))


def test_slices_and_ranks_round_once(subtests: Any, shared_runtimes: Any) -> None:
    """16-bit floats rounded on each rank and again over the ranks would be another number in a quarter of the cases.

    Of seven rows in two slices per rank. The oracle is torch's float32 arithmetic on the values of all slices.
    """

    def half(x: Any) -> Any:
        return x.float().mean(0).to(x.dtype)

    for dtype, op, size, is_serial in ROUNDED:
        with subtests.test(dtype=dtype, op=op, size=size, is_serial=is_serial):
            x = torch.from_numpy(np.random.default_rng(0).normal(size=(7, size))).to(getattr(torch, dtype))
            f = shared_runtimes[2].function(half, outputs=op, framework="torch")
            ranks = [x] if is_serial else [x[:4], x[4:]]
            on_ranks = []
            for rank in ranks:
                slices = rank.tensor_split(2)
                on_ranks.append(sum(half(part).float() * (len(part) if op == "avg" else 1) for part in slices))
            expected = sum(on_ranks) / (7 if op == "avg" else 1)
            for _ in range(2):
                result = (f.serial if is_serial else f)(x, num_slices=2)
                assert torch.equal(result, expected.to(x.dtype))


def test_bfloat16_rounds_as_torch_does() -> None:
    from synk._pure.dtypes import BFLOAT16, as_numbers, assign
    from synk._pure.tensors import array_of, tensor_of

    values = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values[:4] = [np.inf, -np.inf, np.nan, -0.0]
    out = np.empty(values.shape, BFLOAT16)
    with np.errstate(all="ignore"):
        assign(out, values)
    expected = torch.from_numpy(values).bfloat16()
    got, number = tensor_of(out), ~torch.isnan(expected)
    assert torch.equal(torch.isnan(got), ~number)
    assert torch.equal(got.view(torch.int16)[number], expected.view(torch.int16)[number])
    back = torch.from_numpy(as_numbers(array_of(expected)))
    assert torch.equal(back[number], expected.float()[number])


# -- results ----------------------------------------------------------------------------------------------------------


def test_what_the_function_returns_is_what_comes_back(rt: Any) -> None:
    """Tensors as tensors, arrays as arrays, numbers as numbers."""
    x = torch.arange(5.0)

    def f(x: Any) -> Any:
        return {
            "tensor": x * 2, "array": x.numpy() * 2, "number": len(x), "zero-dim": x.sum(), "item": x.sum().item(),
            "grad": x.requires_grad_() * 1, "text": "abc", "nothing": None, "list": [x, 1.5],
        }  # fmt: skip

    ops = {
        "tensor": "gather", "array": "gather", "number": "sum", "zero-dim": "sum", "item": "sum", "grad": "gather",
        "text": None, "nothing": None, "list": (None, "first"),
    }  # fmt: skip
    expected = {
        "tensor": x * 2, "array": x.numpy() * 2, "number": 5, "zero-dim": x.sum(), "item": np.float64(10.0), "grad": x,
        "text": ["abc"] * 2, "nothing": [None] * 2, "list": [[x[:3], x[3:]], 1.5],
    }  # fmt: skip
    g = rt.function(f, outputs=ops, framework="torch")
    for _ in range(3):
        result = g(x)
        assert_same({**result, "item": np.float64(result["item"])}, expected)
        assert not result["grad"].requires_grad
    assert_same(g(x, output_subset=["zero-dim", "number"]), {"zero-dim": x.sum(), "number": 5})


def test_outputs_over_slices_are_tensors(rt: Any) -> None:
    """Also for a callable op, which gets tensors; a function may fill its buffer again for the next slice."""
    x = torch.arange(12.0).reshape(6, 2)
    buffer: list[Any] = []

    def f(x: Any) -> Any:
        if not buffer:
            buffer.append(torch.zeros(2))
        buffer[0][:] = x.sum(0)
        own = x[0].clone() if x[0, 0] % 4 else x[0].float().numpy()  # each slice returns what it likes
        return buffer[0], buffer[0], x, len(x), x[0].clone(), own

    for dtype in (torch.float32, torch.bfloat16):
        g = rt.function(f, outputs=("sum", None, "gather", None, torch.maximum, None), framework="torch")
        total, parts, rows, lengths, largest, own = g(x.to(dtype), num_slices=3)
        assert torch.equal(total, x.sum(0))
        assert_same(parts, [[row.clone() for row in x[:3]], [row.clone() for row in x[3:]]])
        assert_same((rows, largest, lengths), (x.to(dtype), x[5].to(dtype), [[1, 1, 1]] * 2))
        each = [row.to(dtype) if row[0] % 4 else row.numpy() for row in x]
        assert_same(own, [each[:3], each[3:]])


def test_nested_batches_that_are_written_into_and_verified(shared_runtimes: Any) -> None:
    """Texts stay arrays. What is written into a rank's rows stays there."""

    def f(fields: Any) -> Any:
        assert fields["name"] == "n" and isinstance(fields["texts"], np.ndarray)
        fields["x"].add_(1)
        return {"x": fields["x"] * fields["mask"], "texts": fields["texts"], "sum": fields["x"].double().sum()}

    g = shared_runtimes[2].function(f, outputs={"x": "gather", "texts": "gather", "sum": "avg"}, framework="torch")
    x = torch.arange(10).reshape(5, 2).bfloat16()
    batch = {"x": x, "mask": torch.ones(5, 2).bool(), "texts": list("abcde"), "name": "n"}
    for _ in range(3):
        result = g(batch)
        assert_same((result["x"], result["texts"]), (x + 1, np.array(batch["texts"])))
        assert torch.equal(x, torch.arange(10).reshape(5, 2).bfloat16())
    report = g.verify(batch)
    assert [output.verdict for output in report.outputs] == ["equal", "equal", "different"]
    assert report.outputs[2].matching == ("sum",)


def test_tensors_in_a_list_of_rows_come_back_like_other_tensors(shared_runtimes: Any) -> None:
    """Without a gradient, and without the memory of all rows, which a pickle of a row's view holds."""
    x, one = torch.arange(12.0).reshape(6, 2), torch.ones((), requires_grad=True)
    f = shared_runtimes[2].function(
        lambda x: [{"view": row, "grad": row * one, "mean": float(row.mean())} for row in x],
        outputs="gather",
        framework="torch",
    )
    for num_slices in (1, 2):
        for row, found in zip(x, f(x, num_slices=num_slices), strict=True):
            assert_same((found["view"], found["grad"], found["mean"]), (row, row, float(row.mean())))
            assert (found["view"].untyped_storage().nbytes(), found["grad"].requires_grad) == (8, False)
    objects = shared_runtimes[2].function(
        lambda x: [SimpleNamespace(row=row) for row in x], outputs="gather", framework="torch"
    )
    assert [found.row.untyped_storage().nbytes() for found in objects(x)] == [8] * 6


# -- from call to call ------------------------------------------------------------------------------------------------


def test_a_tensor_and_an_array_that_lie_alike_are_told_apart(shared_runtimes: Any) -> None:
    """bfloat16 lies in memory as int16 does, and every call is like the one before but for that."""
    f = shared_runtimes[2].function(lambda x: (x.double().sum(), x), outputs=("sum", "gather"), framework="torch")
    half, whole = torch.arange(6.0).bfloat16(), np.arange(6, dtype=np.int16)
    for _ in range(2):
        for value, dtype in ((half, torch.bfloat16), (whole, torch.int16), (torch.tensor(whole), torch.int16)):
            for call in (f, f, f, lambda x: f.submit(x).result(), lambda x: f.submit(x).result()):
                total, rows = call(value)
                assert (rows.dtype, total) == (dtype, 15.0)
                assert torch.equal(rows.double(), torch.arange(6.0).double())


HOWS = ("", "", "", "keep", "drop", "write", "assign", "raise", "other")


@pytest.mark.parametrize("seed", seeds(1, 8))
def test_any_sequence_of_calls_equals_numpy(rt: Any, seed: int) -> None:
    """Tensors, arrays, Data, numbers, batches, submitted or not; functions write, keep, assign and return others."""
    rng = np.random.default_rng(seed)
    kept: list[Any] = []
    w = rt.shared(np.zeros(3))

    def act(how: str, scale: float, x: Any) -> tuple[Any, Any]:
        kept[:] = [each for each in kept if how != "drop"]
        assert all(np.array_equal(np.asarray(each), value) for each, value in kept)
        if how == "keep":
            kept.append((x, np.asarray(x).copy()))
        if how == "write":
            x += 1
        if how == "assign":
            w.value = w.value + 1
        if how == "raise":
            raise LookupError(how)
        first = (x * scale).sum(0)
        return (first if how != "other" else first.reshape(3, 1)), x.mean(0)

    options = {"bcast_inputs": ("how", "scale"), "outputs": ("sum", "avg"), "framework": "torch"}
    functions = [rt.function(act, **options) for _ in range(2)]
    data, count = rt.data(np.zeros((8, 3))), 0
    for _ in range(120):
        how, scale = str(rng.choice(HOWS)), (2, 0.5, torch.tensor(0.5).double())[rng.integers(3)]
        x = rng.normal(size=(rng.choice([8, 8, 8, 20_000]), 3))
        kind = rng.integers(1 if how == "keep" else 0, 4)  # what is kept of Data follows it, by contract
        x = x.astype(np.float32) if kind == 3 else x
        if kind == 0:
            data.set_value(x)
        passed = (data, torch.from_numpy(x.copy()), x.copy(), x.copy())[kind]
        batch = [None, 5, slice(1, 7), [3, 1, 7]][rng.integers(4)]
        rows = x if batch is None else x[:batch] if batch == 5 else x[batch]
        f = functions[rng.integers(2)]
        call = f if rng.random() < 0.7 else lambda *args, f=f, **options: f.submit(*args, **options).result()
        if how == "raise":
            with pytest.raises(LookupError, match="raise"):
                call(how, scale, passed, batch=batch)
            continue
        total, mean = call(how, scale, passed, batch=batch)
        rows = rows + (how == "write")
        tolerance = {"rtol": 1e-3, "atol": 1e-2} if kind == 3 else {"rtol": 1e-9, "atol": 1e-9}
        expected = (rows * float(scale)).sum(0)
        np.testing.assert_allclose(total, expected.reshape(3, 1) if how == "other" else expected, **tolerance)
        np.testing.assert_allclose(mean, rows.mean(0), **tolerance)
        np.testing.assert_array_equal(np.asarray(passed), x)
        count += how == "assign"
        assert w.value.tolist() == [count] * 3


# -- structures, and functions that name no framework -----------------------------------------------------------------


def test_broadcast_structures(rt: Any, subtests: Any) -> None:
    """With the framework arrays in tuples, lists and dicts are tensors, too; what is written stays on the rank."""
    array = np.arange(3.0)

    def write(w: Any, x: Any) -> Any:
        before = told(w)
        w["t"] += 1
        w["a"][0].mul_(2)
        w["half"].zero_()
        return before, w["t"], w["a"][0]

    for k in range(3):
        value = {"t": torch.full((3,), float(k)), "a": [array, 5], "half": torch.ones(2, 2).bfloat16().T}
        expected = {**value, "a": [torch.tensor(array), 5]}
        with subtests.test(call=k):
            f = rt.function(write, bcast_inputs="w", outputs="first", framework="torch")
            assert_same(f(value, X), (told(expected), value["t"] + 1, torch.tensor(array) * 2))
            g = rt.function(lambda w, x: told(w), bcast_inputs="w", outputs=None)
            assert g(value, X) == [told(value)] * 2
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    h = rt.function(lambda w, x: w[1][1][0].sum().item(), bcast_inputs="w", outputs=None)
    assert h(loop, X) == [2.0, 2.0], "a structure may hold itself"


def test_the_bytes_of_broadcast_tensors_are_not_pickled(rt: Any) -> None:
    model = torch.nn.Linear(300, 300)
    f = rt.function(
        lambda m, w, x: m(x + w["w"].float()).detach(), bcast_inputs=("m", "w"), outputs="gather", framework="torch"
    )
    x, w = torch.ones(4, 300), {"w": torch.ones(300, dtype=torch.bfloat16)}
    before = rt.counters["bytes_pickled"]
    result = f(model, w, x)
    assert rt.counters["bytes_pickled"] - before < 20_000
    torch.testing.assert_close(result, model(x + 1).detach())


def test_without_the_framework_rows_are_arrays(rt: Any) -> None:
    f = rt.function(named("f", lambda x: (x, type(x).__name__)), outputs=("gather", None))
    assert_same(f(torch.arange(3)), (np.arange(3), ["ndarray"] * 2))
    with pytest.raises(
        TypeError, match=r'x of .f.: got a tensor of dtype bfloat16.*framework="torch".*tensor.float\(\)'
    ):
        f(torch.ones(3).bfloat16())
    with pytest.raises(TypeError, match="bfloat16, which NumPy does not have"):
        rt.data(torch.ones(3).bfloat16())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(4, requires_grad=True), r"requires grad.*tensor\.detach\(\).*synk\.torch\.DataParallel"),
    (lambda: torch.ones(4, requires_grad=True) * 2, "requires grad"),
    (lambda: torch.nn.Parameter(torch.ones(4)), "requires grad"),
    (lambda: torch.ones(4).to_sparse(), r"layout torch\.sparse_coo.*to_dense"),
    (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), "quantized tensor.*dequantize"),
    (lambda: torch.ones(4, device="meta"), "device meta, which has no values"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
]


def test_tensors_that_cannot_travel_are_refused(shared_runtimes: Any, subtests: Any) -> None:
    good = torch.ones(4)
    for framework, (make, text) in itertools.product((None, "torch"), REFUSED):
        f = shared_runtimes[2].function(named("f", lambda w, x: 1.0), bcast_inputs="w", framework=framework)
        assert [f(good, good) for _ in range(3)] == [1.0] * 3  # the plan of such a call is known
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = make()
        places = {"x": (good, value), r"x\['a'\]\[1\]": (good, {"a": (good, value)})}
        if "requires grad" in text or framework:
            places["w"] = value, good
        if "requires grad" in text:
            places[r"w\['a'\]\[1\]"] = {"a": [1, value]}, good
        for place, arguments in places.items():
            with (
                subtests.test(text=text, framework=framework, place=place),
                pytest.raises(TypeError, match=rf"cannot share {place} of 'f': got .*{text}"),
            ):
                f(*arguments)
        assert f(good, good) == 1.0
