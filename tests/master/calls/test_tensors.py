"""torch's tensors as arguments and results. The oracle is the function itself on the whole tensors, and torch."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import UserDict
from typing import Any

import numpy as np
import pytest
from support.harness import script

torch = pytest.importorskip("torch")

EVERYWHERE = (pytest.param(1, marks=pytest.mark.storm), 2, 3, "inline")  # one worker is as one inline
DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def numbers(dtype: str, *shape: int) -> Any:
    """Return a tensor of small numbers."""
    values = np.random.default_rng(sum(shape)).integers(0, 9, shape)
    wide = torch.tensor(values).to(torch.complex64 if "complex" in dtype else torch.float32)
    return wide.to(getattr(torch, dtype))


def as_bits(tensor: Any) -> Any:
    """Return a tensor's memory as integers: torch computes little with its smallest floats."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.element_size() > 8 else tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def picked(tensor: Any, rows: list[int]) -> Any:
    """Return rows of a tensor."""
    return tensor[rows] if tensor.element_size() > 8 else as_bits(tensor)[rows].view(tensor.dtype)


def bits(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors that are equal to the bit have in common."""
    return tensor.dtype, tuple(tensor.shape), as_bits(tensor).tolist()


def assert_same(got: Any, expected: Any) -> None:
    """Assert that two nestings are equal to the bit, types included."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert bits(got) == bits(expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_same(one, other)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.sampled(60)
def test_every_dtype_there_and_back(shared_runtimes: Any, where: Any, dtype: str) -> None:
    rt = shared_runtimes[where]
    f = rt.function(lambda w, x: (x, w), bcast_inputs="w", outputs=("gather", "first"), framework="torch")
    for rows in (0, 1, 7):
        x, w = numbers(dtype, rows, 3), numbers(dtype, 4)
        for call in (f, f, f.serial, lambda *args, **options: f.submit(*args, **options).result()):
            if rows:
                assert_same(call(w, x), (x, w))
        gather = rt.function(lambda x: x, outputs="gather", framework="torch")
        assert_same(gather(x), x)
        if rows == 7:
            assert_same(f(w, x, batch=[6, 0, 0]), (picked(x, [6, 0, 0]), w))
            assert_same(f(w, x, batch=slice(None, None, -2)), (picked(x, [6, 4, 2, 0]), w))
            assert_same(gather(x, num_slices=3), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.T,
        lambda x: x[::2],
        lambda x: x[:, 1:],
        lambda x: x[:1].expand(6, 4),
        lambda x: torch.flip(x, [0]),
        lambda x: x.to_dense() if x.is_sparse else x[2:4],
        lambda x: x.reshape(4, 3, 2).permute(2, 0, 1),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x[:, 0],
        lambda x: x[:, :0],
        lambda x: torch.nn.Parameter(x, requires_grad=False),
    ],
)
def test_any_strides_and_lazy_values(shared_runtimes: Any, make: Any) -> None:
    x = make(torch.arange(24.0).reshape(6, 4))
    outputs = ("gather", "first")
    f = shared_runtimes[2].function(lambda w, x: (x * 2, w * 2), bcast_inputs="w", outputs=outputs, framework="torch")
    for value in (x, x.bfloat16()) if not x.is_complex() else (x,):
        result = f(value, value)
        assert torch.equal(result[0], value.detach() * 2)
        assert torch.equal(result[1], value.detach() * 2)


OPS: dict[str, Any] = {"sum": lambda x: x.sum(0), "avg": lambda x: x.mean(0), "min": lambda x: x.amin(0)}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [3, 100_000])
def test_reductions_give_tensors(shared_runtimes: Any, op: str, dtype: str, size: int) -> None:
    """16-bit floats are combined in float32, and rounded once as torch rounds."""
    rt = shared_runtimes[3]
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    f = rt.function(OPS[op], outputs=op, framework="torch")
    parts = [OPS[op](part).double() for part in torch.tensor_split(x, 3)]
    weights = torch.tensor([3.0, 3.0, 2.0], dtype=torch.float64)[:, None]
    stacked = torch.stack(parts)
    exact = {
        "sum": stacked.sum(0),
        "avg": (stacked * weights).sum(0) / 8,
        "min": stacked.amin(0),
    }[op]
    result = f(x)
    assert (result.dtype, result.shape) == (x.dtype, (size,))
    precision = {"float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 1e-6)
    if op == "min":
        assert torch.equal(result.double(), exact)
    else:
        assert torch.allclose(result.double(), exact, rtol=precision / 2 * 1.01 + 1e-6, atol=1e-6)
    sliced = f(x, num_slices=2)
    assert sliced.dtype == x.dtype
    assert torch.allclose(sliced.double(), exact, rtol=4 * precision, atol=16 * precision)


def test_bfloat16_rounds_as_torch_does() -> None:
    from synk._pure.dtypes import BFLOAT16, as_numbers, assign
    from synk._pure.tensors import array_of, tensor_of

    values = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values[:4] = [np.inf, -np.inf, np.nan, -0.0]
    out = np.empty(values.shape, BFLOAT16)
    with np.errstate(all="ignore"):
        assign(out, values)
    expected = torch.from_numpy(values).bfloat16()
    got = tensor_of(out)
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    number = ~torch.isnan(expected)
    assert torch.equal(got.view(torch.int16)[number], expected.view(torch.int16)[number])
    back = torch.from_numpy(as_numbers(array_of(expected)))
    assert torch.equal(back[number], expected.float()[number])


def test_what_the_function_returns_is_what_comes_back(shared_runtimes: Any) -> None:
    """Tensors as tensors, arrays as arrays, numbers as numbers."""
    rt = shared_runtimes[2]

    def f(x: Any) -> Any:
        return {
            "tensor": x * 2, "array": x.numpy() * 2, "number": len(x), "zero-dim": x.sum(),
            "grad": x.requires_grad_() * 1, "text": "abc", "nothing": None, "list": [x, 1.5],
        }  # fmt: skip

    ops = {
        "tensor": "gather", "array": "gather", "number": "sum", "zero-dim": "sum", "grad": "gather", "text": None,
        "nothing": None, "list": (None, "first"),
    }  # fmt: skip
    x = torch.arange(5.0)
    for _ in range(4):
        result = rt.function(f, outputs=ops, framework="torch")(x)
        assert_same(result["tensor"], x * 2)
        assert_same(result["array"], x.numpy() * 2)
        assert (type(result["number"]), result["number"]) == (int, 5)
        assert_same(result["zero-dim"], x.sum())
        assert not result["grad"].requires_grad
        assert (result["text"], result["nothing"]) == (["abc"] * 2, [None] * 2)
        assert_same(result["list"], [[x[:3], x[3:]], 1.5])
    assert_same(rt.function(lambda x: x.sum().item(), outputs="first", framework="torch")(x), 3.0)
    subset = rt.function(f, outputs=ops, framework="torch")(x, output_subset=["zero-dim", "number"])
    assert_same(subset["zero-dim"], x.sum())


@pytest.mark.parametrize("slices", [1, 2])
def test_a_callable_op_gets_tensors(shared_runtimes: Any, slices: int) -> None:
    rt = shared_runtimes[2]
    x = torch.tensor([[3.0, 1.0], [2.0, 5.0], [0.0, 9.0], [4.0, 4.0]]).bfloat16()
    f = rt.function(lambda x: x[0].clone(), outputs=torch.maximum, framework="torch")
    expected = x[::2].amax(0) if slices == 1 else x.amax(0)
    assert_same(f(x, num_slices=slices), expected)


def test_outputs_over_slices_are_tensors(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = torch.arange(12.0).reshape(6, 2)
    buffer: list[Any] = []

    def f(x: Any) -> Any:
        if not buffer:
            buffer.append(torch.zeros(2))
        buffer[0][:] = x.sum(0)  # a function may fill it again for the next slice
        return buffer[0], buffer[0], x, len(x)

    for dtype in (torch.float32, torch.bfloat16):
        g = rt.function(f, outputs=("sum", None, "gather", None), framework="torch")
        total, parts, rows, lengths = g(x.to(dtype), num_slices=3)
        assert torch.equal(total, x.sum(0))
        assert_same(parts, [[row.clone() for row in x[:3]], [row.clone() for row in x[3:]]])
        assert_same(rows, x.to(dtype))
        assert lengths == [[1, 1, 1]] * 2


def test_verify_compares_tensors(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: (x.mean(0), x.sum(0), x), outputs=("avg", "avg", "gather"), framework="torch")
    for dtype in (torch.float32, torch.bfloat16):
        report = f.verify(torch.arange(21.0).reshape(7, 3).to(dtype))
        assert [output.verdict for output in report.outputs] == ["equal", "different", "equal"]
        assert report.outputs[1].matching == ("sum",)


def test_buffers_used_again_and_results_kept(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: (x + 1, x.sum()), outputs=("gather", "sum"), framework="torch")
    for size in (10, 300_000):
        buffer = torch.zeros(size, dtype=torch.bfloat16)
        results, calls = [], []
        for number in range(7):
            buffer[:] = number
            results.append(f(buffer))
            calls.append(f.submit(buffer))
            buffer[:] = -1
        for number, (result, call) in enumerate(zip(results, calls)):
            for rows, _ in (result, call.result()):
                assert torch.equal(rows, torch.full((size,), number + 1.0).bfloat16())


def test_three_calls_in_flight_with_tensors_changed_afterwards(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda w, fields: fields["x"] @ w["a"], bcast_inputs="w", outputs="gather", framework="torch")
    x, w = torch.ones(64, 8), {"a": torch.ones(8, 2)}
    calls = []
    for number in range(9):
        x.fill_(float(number))
        w["a"].fill_(float(number + 1))
        calls.append(f.submit(w, {"x": x}))
        x.fill_(-1.0)
        w["a"].fill_(-1.0)
    for number, call in enumerate(calls):
        assert torch.equal(call.result(), torch.full((64, 2), 8.0 * number * (number + 1)))


def test_a_tensor_and_an_array_that_lie_alike_are_told_apart(shared_runtimes: Any) -> None:
    """bfloat16 lies in memory as int16 does, and every call is like the one before but for that."""
    rt = shared_runtimes[2]
    f = rt.function(lambda x: (x.double().sum(), x), outputs=("sum", "gather"), framework="torch")
    half, whole = torch.arange(6.0).bfloat16(), np.arange(6, dtype=np.int16)
    for _ in range(2):
        for value, dtype in ((half, torch.bfloat16), (whole, torch.int16), (torch.tensor(whole), torch.int16)):
            for call in (f, f, f, f, lambda x: f.submit(x).result(), lambda x: f.submit(x).result()):
                total, rows = call(value)
                assert (rows.dtype, total) == (dtype, 15.0)
                assert torch.equal(rows.double(), torch.arange(6.0).double())


def test_nested_batches_of_tensors(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    batch = UserDict(
        input_ids=torch.arange(10).reshape(5, 2), mask=torch.ones(5, 2).bool(), texts=list("abcde"), name="n"
    )

    def f(fields: Any) -> Any:
        assert fields["name"] == "n" and isinstance(fields["texts"], np.ndarray)
        return {"ids": fields["input_ids"] * fields["mask"], "texts": fields["texts"]}

    result = rt.function(f, outputs="gather", framework="torch")(batch)
    assert_same(result["ids"], batch["input_ids"])
    assert result["texts"].tolist() == batch["texts"]


def test_broadcast_tensors_and_structures(shared_runtimes: Any) -> None:
    """With the framework arrays in tuples, lists and dicts are tensors, too; what is written into them stays there."""
    rt = shared_runtimes[2]

    def f(w: Any, x: Any) -> Any:
        kinds = [type(w["t"]).__name__, type(w["a"][0]).__name__, w["n"], w["half"].dtype]
        w["t"] += 1
        w["a"][0].mul_(2)
        w["half"].zero_()
        return kinds, w["t"], w["a"][0]

    g = rt.function(f, bcast_inputs="w", outputs=(None, "first", "first"), framework="torch")
    value = {"t": torch.ones(3), "a": [np.arange(3.0)], "n": 5, "half": torch.ones(2, 2).bfloat16().T}
    for _ in range(3):
        kinds, tensor, array = g(value, torch.zeros(4))
        assert kinds == [["Tensor", "Tensor", 5, torch.bfloat16]] * 2
        assert_same(tensor, torch.full((3,), 2.0))
        assert_same(array, torch.arange(3.0, dtype=torch.float64) * 2)
    assert torch.equal(value["t"], torch.ones(3))


def test_the_bytes_of_broadcast_tensors_are_not_pickled(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    model = torch.nn.Linear(300, 300)
    f = rt.function(
        lambda m, w, x: m(x + w["w"].float()).detach(),
        bcast_inputs=("m", "w"),
        outputs="gather",
        framework="torch",
    )
    x, w = torch.ones(4, 300), {"w": torch.ones(300, dtype=torch.bfloat16)}
    before = rt.counters["bytes_pickled"]
    result = f(model, w, x)
    assert rt.counters["bytes_pickled"] - before < 20_000
    torch.testing.assert_close(result, model(x + 1).detach())
    for _ in range(2):  # without the framework they stay tensors as well
        g = rt.function(lambda w, x: [type(w).__name__, w.sum().item()], bcast_inputs="w", outputs=None)
        assert g(torch.ones(3), np.ones(2)) == [["Tensor", 3.0]] * 2


def test_without_the_framework_tensors_are_arrays(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: (x, type(x).__name__), outputs=("gather", None), name="f")
    rows, kinds = f(torch.arange(3))
    assert_same(rows, np.arange(3))
    assert kinds == ["ndarray"] * 2
    with pytest.raises(
        TypeError, match=r'x of .f.: got a tensor of dtype bfloat16.*framework="torch".*tensor.float\(\)'
    ):
        f(torch.ones(3).bfloat16())
    with pytest.raises(TypeError, match="bfloat16, which NumPy does not have"):
        rt.data(torch.ones(3).bfloat16())


REFUSED: list[tuple[Any, str]] = [
    (lambda: torch.ones(4, requires_grad=True), r"requires grad.*tensor\.detach\(\).*synk\.torch\.DataParallel"),
    (lambda: torch.ones(4, requires_grad=True) * 2, "requires grad"),
    (lambda: torch.nn.Parameter(torch.ones(4)), "requires grad"),
    (lambda: torch.ones(4).to_sparse(), r"layout torch\.sparse_coo.*to_dense"),
    (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), "quantized tensor.*dequantize"),
    (lambda: torch.ones(4, device="meta"), "device meta, which has no values"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("framework", [None, "torch"])
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_tensors_that_cannot_travel_are_refused(shared_runtimes: Any, case: int, framework: str | None) -> None:
    rt = shared_runtimes[2]
    make, text = REFUSED[case]
    f = rt.function(lambda w, x: 1.0, bcast_inputs="w", framework=framework, name="f")
    f(torch.ones(4), torch.ones(4))
    before = rt.counters["messages_down"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = make()
    with pytest.raises(TypeError, match=rf"cannot share x of 'f': got .*{text}"):
        f(torch.ones(4), value)
    with pytest.raises(TypeError, match=rf"cannot share x\['a'\]\[1\] of 'f': got .*{text}"):
        f(torch.ones(4), {"a": (torch.ones(4), value)})
    if "requires grad" in text or framework:
        with pytest.raises(TypeError, match=rf"cannot share w of 'f': got .*{text}"):
            f(value, torch.ones(4))
    if "requires grad" in text:
        with pytest.raises(TypeError, match=rf"cannot share w\['a'\]\[1\] of 'f': got .*{text}"):
            f({"a": [1, value]}, torch.ones(4))
    assert rt.counters["messages_down"] == before
    assert f(torch.ones(4), torch.ones(4)) == 1.0


def test_broadcast_structures_may_hold_themselves(shared_runtimes: Any) -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    f = shared_runtimes[2].function(lambda w, x: w[1][1][0].sum().item(), bcast_inputs="w", outputs=None)
    assert f(loop, np.ones(2)) == [2.0, 2.0]


def test_bfloat16_between_ranks(shared_runtimes: Any) -> None:
    import synk

    rt = shared_runtimes[2]
    f = rt.function(
        lambda x: (synk.comm.all_reduce(x.sum(0), "sum"), synk.comm.all_gather(x[0])),
        outputs="first",
        framework="torch",
    )
    x = torch.arange(8.0).reshape(4, 2).bfloat16()
    total, rows = f(x)
    assert_same(total, x.sum(0))
    assert_same(rows, x[[0, 2]])


def test_a_tensor_that_is_written_into_stays_the_callers(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.add_(1).sum(), outputs="sum", framework="torch")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(8, dtype=dtype)
        for _ in range(3):
            assert f(x) == 8.0
        assert torch.equal(x, torch.zeros(8, dtype=dtype))


def test_results_can_be_copied_and_used_in_another_thread(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x * 2, outputs="gather", framework="torch")
    kept = []
    thread = threading.Thread(target=lambda: kept.append(copy.deepcopy(f(torch.ones(300_000)))))
    thread.start()
    thread.join()
    for _ in range(3):
        f(torch.zeros(300_000))
    assert torch.equal(kept[0], torch.full((300_000,), 2.0))


def test_torch_is_imported_by_whom_asks_for_it() -> None:
    script(
        """
        import sys

        def total(x):
            return x.sum()

        with synk.fork(1, backend="numpy") as rt:
            assert rt.function(total, outputs="sum")(np.arange(4.0)) == 6.0
            assert rt.function(lambda b: total(b["x"]), outputs="sum")({"x": np.arange(4.0)}) == 6.0
            assert "torch" not in sys.modules
            result = rt.function(total, outputs="sum", framework="torch")(np.arange(4.0))
            import torch
            assert isinstance(result, torch.Tensor) and result == 6.0
        """
    ).check()
