"""The whole path of a call with GPU workers, on a machine without a GPU.

Real worker processes run the backend ``cupy`` over a stand-in for CuPy whose arrays refuse implicit conversion to
NumPy, so that no hidden assumption about host memory survives. Reductions go by a stand-in for NCCL, or through the
host. What a GPU does with it is in ``test_gpu_calls.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import fake_gpus
from support.fake_gpus import Gpus
from support.harness import start_polars

import synk

start_polars()

LARGE = 70_000
"""Elements that are a large output in every dtype."""

DTYPES = (
    "int8",
    "int16",
    "uint16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
)
NUMPY = {
    "sum": lambda parts: parts.sum(axis=0, dtype=parts.dtype),
    "prod": lambda parts: parts.prod(axis=0, dtype=parts.dtype),
    "min": lambda parts: parts.min(axis=0),
    "max": lambda parts: parts.max(axis=0),
}


@pytest.fixture(params=["nccl", "host"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Gpus]:
    made = Gpus(monkeypatch, request.param == "nccl", reuse)
    yield made
    while made.opened:
        made.opened.pop().close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Gpus]:
    """Return a maker of runtimes where it does not matter how the ranks communicate."""
    made = Gpus(monkeypatch, True, reuse)
    yield made
    while made.opened:
        made.opened.pop().close()


# -- calls -----------------------------------------------------------------------------------------------------------


def test_a_device_without_memory_takes_slices(gpu: Any) -> None:
    """With a stand-in, whose memory ends for more than ten rows at a time."""
    rt = gpu.reused(2)

    def total(x: Any) -> Any:
        import cupy

        if len(x) > 10:
            raise cupy.cuda.memory.OutOfMemoryError(1 << 30, 0)
        return x.sum()

    f = rt.function(total, outputs="sum", on_oom="slices")
    assert [float(f(np.arange(70.0))) for _ in range(2)] == [70 * 69 / 2] * 2
    with pytest.raises(MemoryError, match="out of device memory"):
        rt.function(total, outputs="sum")(np.arange(70.0))


def test_memory_that_the_other_library_keeps_is_given_back(gpu: Any) -> None:
    """With stand-ins, whose memory is full until the one or the other has given back what it does not use."""
    pytest.importorskip("torch")

    def full(x: Any, library: str) -> Any:
        import cupy
        import torch

        if not hasattr(torch, "synk_given"):
            torch.synk_given = {"torch": 0}
            torch.cuda.is_initialized = lambda: True
            torch.cuda.empty_cache = lambda: torch.synk_given.update(torch=torch.synk_given["torch"] + 1)
        given = torch.synk_given | {"cupy": cupy.cuda.Pool.num_freed}
        if given[library] == 0 and synk.comm.rank == 0:
            raise (cupy.cuda.memory.OutOfMemoryError if library == "torch" else torch.cuda.OutOfMemoryError)(1, 2)
        return x.sum()

    for library in ("torch", "cupy"):
        for framework in (None, "torch"):
            rt = gpu(2)
            f = rt.function(full, bcast_inputs="library", outputs="sum", framework=framework)
            assert float(f(np.arange(7.0), library)) == 21.0
            rt.close()


@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_call_that_runs_out_of_memory_is_run_once_more(gpu: Any, num_slices: int) -> None:
    rt = gpu.reused(2)
    runs = rt.resident([])

    def full(x: Any, is_full: Any) -> Any:
        import cupy

        runs.value.append(len(x))
        if is_full["always"] or len(runs.value) == 1:
            raise cupy.cuda.memory.OutOfMemoryError(1 << 30, 0)
        return x.sum()

    f = rt.function(full, bcast_inputs="is_full", outputs="sum")
    counted = rt.function(lambda: len(runs.value), per_rank=True, outputs=None)
    assert float(f(np.arange(6.0), {"always": False}, num_slices=num_slices)) == 15.0
    before = counted()
    with pytest.raises(MemoryError, match=r"out of device memory.*Pass num_slices=2 or more"):
        f(np.arange(6.0), {"always": True}, num_slices=num_slices)
    assert [now - then for now, then in zip(counted(), before)] == [2, 2]


def test_what_is_copied_to_devices_and_back_is_counted(gpu: Any) -> None:
    """With a stand-in for CuPy: that the counters are in the right places, and nothing about a real device."""
    rt = gpu(2)
    x, y, w = rt.data(np.ones((100, 30))), np.ones((100, 4), np.float32), np.ones(30)
    f = rt.function(lambda x, y, w: x @ w + y.sum(), bcast_inputs="w", outputs="gather", name="counted copies")
    picked = rt.function(lambda x: x[:, 0], outputs="gather", name="picked rows")
    for _ in range(3):
        f(x, y, w)
    picked(x, batch=[5, 7, 9])
    found = {(each.function, each.kind): each for each in rt.profile.transfers}
    assert found["counted copies", "h2d"].nbytes == 3 * (100 * 30 * 8 + 100 * 4 * 4 + 2 * 30 * 8)
    assert found["counted copies", "d2h"].nbytes == 3 * 100 * 8
    assert found["counted copies", "h2d"].calls == 3 * 2
    assert [found["counted copies", kind].direction for kind in ("h2d", "d2h")] == ["to devices", "from devices"]
    assert found["picked rows", "h2d"].nbytes == 3 * 30 * 8 and found["picked rows", "d2h"].nbytes == 3 * 8
    assert not any(each.phases for each in rt.profile.ranks)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_call_equals_numpy(gpu: Any, num_workers: int) -> None:
    rt = gpu.reused(num_workers)
    rng = np.random.default_rng(0)
    rows, targets, w = rng.standard_normal((101, 5)), rng.standard_normal(101), rng.standard_normal(5)

    def loss_and_grad(w: Any, x: Any, y: Any) -> Any:
        assert type(x).__module__ == type(w).__module__ == "cupy"
        r = x @ w - y
        return 0.5 * (r @ r) / len(x), r @ x / len(x)

    f = rt.function(loss_and_grad, bcast_inputs="w", outputs="avg")
    x, y = rt.data(rows), rt.data(targets)
    for batch in (None, 50, slice(3, 90, 7), slice(None, None, -1), [5, 3, 3, 99, 0], rows[:, 0] > 0):
        index = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
        r = rows[index] @ w - targets[index]
        expected = 0.5 * (r @ r) / len(r), r @ rows[index] / len(r)
        for arguments in ((w, x, y), (w, rows, targets)):
            for num_slices in (1, 4):
                got = f(*arguments, batch=batch, num_slices=num_slices)
                np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
                np.testing.assert_allclose(got[1], expected[1], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(f.serial(w, x, y, batch=batch)[1], expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_op_and_dtype_equals_numpy(gpus: Gpus, num_workers: int) -> None:
    """Small and large outputs, of a length that is no multiple of the ranks."""
    rt = gpus.reused(num_workers)

    def outputs(rank: int) -> dict[str, np.ndarray]:
        made = {}
        for dtype in DTYPES:
            for op in NUMPY:
                if (dtype == "bool" and op in ("sum", "prod")) or (dtype.startswith("c") and op in ("min", "max")):
                    continue
                for count in (5, (1 << 18) // np.dtype(dtype).itemsize + 1):
                    array = (np.arange(count) % 5 + rank).astype(dtype)
                    if array.dtype.kind == "f":
                        array[count // 2 + rank :: 1000] = np.nan
                    made[f"{dtype} {op} {count}"] = array
        return made

    def body(row: Any) -> dict[str, Any]:
        import cupy

        return {name: cupy.asarray(array) for name, array in outputs(int(row[0])).items()}

    made = [outputs(rank) for rank in range(num_workers)]
    f = rt.function(body, outputs={name: name.split()[1] for name in made[0]})
    got = f(np.arange(num_workers))
    for name in made[0]:
        parts = np.stack([arrays[name] for arrays in made])
        with np.errstate(all="ignore"):
            expected = NUMPY[name.split()[1]](parts)
        assert got[name].dtype == expected.dtype, name
        np.testing.assert_array_equal(got[name], expected, err_msg=name)


def test_averages_are_weighted_by_rows(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    x = np.random.default_rng(1).standard_normal(100)

    def body(x: Any) -> Any:
        import cupy

        return cupy.full(5, float(x.mean())), cupy.full(LARGE * 4 + 1, float(x.mean()), "f4"), x.mean()

    for rows in (100, 2):  # with two rows one rank does not run
        small, large, number = rt.function(body, outputs="avg")(x[:rows])
        np.testing.assert_allclose(small, x[:rows].mean(), rtol=1e-12)
        np.testing.assert_allclose(large, x[:rows].mean(), rtol=1e-5)
        np.testing.assert_allclose(number, x[:rows].mean(), rtol=1e-12)


def test_other_ops_and_results(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    rows = np.arange(3 * LARGE * 4.0).reshape(-1, 4)

    def body(x: Any, scale: Any) -> dict[str, Any]:
        return {
            "gather": x * scale["by"][0],
            "first": x[0],
            "each": (len(x), "words", x[:1]),
            "folded": x[:2],
            "host": np.full(LARGE * 4, scale["k"]),
        }

    outputs = {"gather": "gather", "first": "first", "each": None, "folded": np.subtract, "host": "max"}
    f = rt.function(body, bcast_inputs="scale", outputs=outputs)
    got = f(rows, {"by": np.array([2.0]), "k": 3.0})
    np.testing.assert_array_equal(got["gather"], rows * 2)
    np.testing.assert_array_equal(got["first"], rows[0])
    starts = [0, LARGE, 2 * LARGE]
    for start, (count, text, part) in zip(starts, got["each"], strict=True):
        assert (count, text) == (LARGE, "words")
        np.testing.assert_array_equal(part, rows[start : start + 1])
    np.testing.assert_array_equal(got["folded"], rows[0:2] - rows[LARGE : LARGE + 2] - rows[2 * LARGE : 2 * LARGE + 2])
    assert (got["host"] == 3.0).all()
    np.testing.assert_array_equal(f(rows, {"by": np.array([2.0]), "k": 3.0}, num_slices=3)["gather"], rows * 2)


@pytest.mark.parametrize("value", [np.array(["a", "b"]), np.ones(2, np.longdouble)], ids=["text", "long double"])
def test_text_cannot_go_to_a_device(gpu: Any, value: np.ndarray) -> None:
    """As rows it is an error that names the dtype; inside a broadcast object it stays on the host."""
    rt = gpu.reused(2)
    with pytest.raises(TypeError, match=f"{value.dtype} to cuda:0"):
        rt.function(lambda x: 1.0)(value)

    def host(x: Any, names: Any) -> Any:
        assert type(names["a"]) is np.ndarray
        return len(names["b"])

    assert rt.function(host, bcast_inputs="names", outputs="first")(np.ones(2), {"a": value, "b": "abc"}) == 3


@pytest.mark.parametrize("num_slices", [1, 2])
def test_host_values_of_a_function_stay_on_the_host(gpu: Any, num_slices: int) -> None:
    """Text, which no device takes, and the arrays that a callable op gets."""
    rt = gpu.reused(2)

    def body(x: Any) -> Any:
        return np.array(["a"] * len(x)), np.array("text"), x.sum(keepdims=True)

    def join(a: Any, b: Any) -> Any:
        return np.concatenate([np.asarray(a), np.asarray(b)])

    names, text, sums = rt.function(body, outputs=("gather", "first", join))(np.arange(4.0), num_slices=num_slices)
    assert names.tolist() == ["a"] * 4
    assert str(text) == "text"
    np.testing.assert_array_equal(sums, [1.0, 5.0] if num_slices == 1 else [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("count", [5, 4 * LARGE], ids=["small", "large"])
def test_a_kernel_on_the_default_stream_is_done_before_its_array_is_copied(gpus: Gpus, count: int) -> None:
    """Numba and libraries that are called by ctypes launch there. With a stand-in, which runs it as late as it may."""
    rt = gpus.reused(2)

    def body(x: Any) -> Any:
        import cupy

        out = cupy.zeros(count)
        cupy.cuda.runtime.launch_elsewhere(lambda: out.__setitem__(slice(None), x.sum()))
        return out

    np.testing.assert_array_equal(rt.function(body, outputs="gather")(np.arange(4.0)), np.repeat([1.0, 5.0], count))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tables_stay_on_the_host(gpu: Any, library: str) -> None:
    """No rows of one go to a device; a broadcast one arrives as it is, and one that a function makes is combined."""
    make = importlib.import_module(library).DataFrame
    table, rt = make({"a": [1.0, 2.0, 3.0]}), gpu.reused(2)
    for value, place in ((table, "x"), ({"t": table}, r"x\['t'\]")):
        with pytest.raises(
            TypeError,
            match=rf"cannot scatter {place} of .*DataFrame of {library}, and its inputs are arrays on devices.*"
            rf"{place}\.to_numpy\(\)",
        ):
            rt.function(lambda x: x, outputs="sum")(value)
    f = rt.function(
        lambda x, t: (type(x).__module__.partition(".")[0], t * int(x.sum())),
        bcast_inputs="t",
        outputs=("first", "sum"),
    )
    kind, total = f(np.arange(4.0), table)
    assert kind == "cupy"
    assert list(total["a"]) == [6.0, 12.0, 18.0]


def test_a_train_function_without_a_framework(gpu: Any) -> None:
    from synk.extensions import updates
    from synk.extensions.train_function import make_train_function

    rt = gpu.reused(2)

    def loss_and_grad(params: Any, x: Any) -> Any:
        return (params["w"] * x).mean(), {"w": x.mean().reshape(1)}

    x = np.arange(6.0)
    train = make_train_function(loss_and_grad, {"w": np.array([3.0])}, updates.adam(0.1), runtime=rt)
    for _ in range(3):
        train(x)
    expected, state = {"w": np.array([3.0])}, updates.adam(0.1).init({"w": np.array([3.0])})
    for _ in range(3):
        expected, state = updates.adam(0.1).step(expected, {"w": x.mean().reshape(1)}, state)
    np.testing.assert_allclose(train.params.value["w"], expected["w"])


def test_a_torch_function(gpu: Any) -> None:
    pytest.importorskip("torch")
    rt = gpu.reused(2)
    x = np.arange(12.0).reshape(6, 2)

    def body(x: Any) -> Any:
        import torch

        assert isinstance(x, torch.Tensor)
        return x.sum(0), x.requires_grad_(True).clone()

    total, same = rt.function(body, outputs=("sum", "gather"), framework="torch")(x)
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(same, x)


def test_where_registering_is_refused_calls_work(gpu: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("SYNK_FAKE_REFUSE", "1")
    rt = gpu(2)
    x = rt.data(np.arange(10.0))
    f = rt.function(lambda x: x.sum(), outputs="sum")
    assert [f(x) for _ in range(3)] == [45.0] * 3


def test_data_that_is_freed_is_unregistered(gpu: Any) -> None:
    rt = gpu(2)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    for size in (10, 100_000, 10):
        x = rt.data(np.ones(size))
        assert f(x) == size
        x.free_memory()
        del x

    def registered(row: Any) -> int:
        import cupy

        return len(cupy.cuda.runtime.registered())

    assert max(rt.function(registered, outputs=None)(np.ones(2))) <= 4  # slots, staging, results


def test_inline_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on: what the driver still held registered could not be mapped and registered again."""
    fake_gpus.install(monkeypatch, 1)
    try:
        for _ in range(2):
            with synk.Runtime(inline=True, backend="cupy") as rt:
                x = rt.data(np.ones(1 << 12))
                f = rt.function(lambda x: x.sum(), outputs="sum")
                assert [f(x) for _ in range(3)] == [1 << 12] * 3
            assert not sys.modules["cupy"].cuda.runtime.registered()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            del sys.modules[name]


# -- devices ---------------------------------------------------------------------------------------------------------


def test_auto_takes_the_gpus(gpu: Any) -> None:
    rt = gpu(None)
    assert (rt.backend, rt.devices) == ("cupy", ("cuda:0", "cuda:1", "cuda:2"))

    def body(row: Any) -> Any:
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["NCCL_SOCKET_IFNAME"], synk.comm.device

    found = rt.function(body, outputs=None)(np.ones(3))
    assert [(uuid[:12], *others) for uuid, *others in found] == [
        ("GPU-00000000", "lo", "cuda:0"),
        ("GPU-00000001", "lo", "cuda:1"),
        ("GPU-00000002", "lo", "cuda:2"),
    ]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    text = rt.info()
    assert text.count("Fake GPU") == 3
    assert "NCCL: nccl by fake 2.32.3" in text


@pytest.mark.parametrize("value", ["2,0", "GPU-00000001,GPU-00000002"])
def test_workers_see_their_device_in_the_users_form(gpu: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    seen = gpu(2).function(lambda row: os.environ["CUDA_VISIBLE_DEVICES"], outputs=None)(np.ones(2))
    assert ",".join(seen) == value


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_program_that_holds_device_memory_is_told(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    fake_gpus.install(monkeypatch, 1)
    if library == "torch":
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: (index + 1) << 20)
    else:
        pool = types.SimpleNamespace(total_bytes=lambda: 3 << 20)
        cupy = types.SimpleNamespace(__spec__="here", get_default_memory_pool=lambda: pool)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr("synk.cuda._placement.uses_cuda", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"this program itself holds 3 MiB of device memory") as caught:
        synk.Runtime(1).close()
    assert [each.filename for each in caught] == [__file__]


def test_workers_on_gpus_limit_their_threads(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in os.environ if name.endswith("_NUM_THREADS")]
    for name in (*names, "VECLIB_MAXIMUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    expected = str(max(len(os.sched_getaffinity(0)) // 3, 1))
    limits = gpu().function(lambda row: os.environ.get("OPENBLAS_NUM_THREADS"), outputs=None)(np.ones(3))
    assert limits == [expected] * 3


def test_nccl_that_cannot_start_again_is_not_waited_for(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers were told to reduce by NCCL; once it is given up they must hear that, too."""
    rt = gpu(2)
    f = rt.function(lambda x: x[:1].repeat(LARGE * 4) + 1, outputs="sum")
    assert (f(np.arange(2.0)) == 3.0).all()
    for environment in rt._session.workers.processes.placement.assignment.environments:
        environment["SYNK_FAKE_NCCL"] = "refuse"
    for worker in rt._session.workers.by_rank:
        os.kill(worker.process.pid, signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deaths that were seen between two calls
        with contextlib.suppress(synk.errors.WorkerDied):
            f(np.arange(2.0))
        for _ in range(4):
            assert (f(np.arange(2.0)) == 3.0).all()


def test_workers_that_share_a_gpu_go_without_nccl(gpu: Any) -> None:
    rt = gpu(None, devices=[1, 1])
    assert rt.devices == ("cuda:1", "cuda:1")
    got = rt.function(lambda x: np.full(LARGE * 4, 1.0), outputs="sum")(np.ones(2))
    assert (got == 2.0).all()
    assert "NCCL" not in rt.info()


def test_the_master_imports_no_cupy(gpu: Any) -> None:
    before = set(sys.modules)
    rt = gpu(2)
    rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4))
    # Objects and exceptions may hold arrays of the device: they arrive with arrays of the host.
    held = rt.function(lambda x: deque([x.sum(keepdims=True)]), outputs=None)(np.ones(4))
    assert [type(part[0]) for part in held] == [np.ndarray] * 2

    def fail(x: Any) -> None:
        raise ValueError("no", x)

    with pytest.raises(ValueError) as caught:
        rt.function(fail)(np.ones(4))
    np.testing.assert_array_equal(caught.value.args[1], np.ones(2))
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"cupy", "pynccl", "numba", "torch"}


def test_without_cupy_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from synk.cuda import _nvml

    monkeypatch.setattr(_nvml, "read_snapshot", lambda: fake_gpus.snapshot(2))
    with pytest.raises(synk.errors.UnsupportedError, match=r'pip install "synkhronos\[cuda13\]"'):
        synk.Runtime(backend="cupy")
    with synk.Runtime(1) as rt:
        assert rt.backend == "numpy"


def test_where_nccl_cannot_start_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    made = Gpus(monkeypatch, False)
    with made(2) as rt:
        for _ in range(2):
            rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "NCCL is not used: cannot join an NCCL group" in rt.info()


# -- failures --------------------------------------------------------------------------------------------------------


def test_out_of_device_memory_is_an_exception_of_the_call(gpu: Any) -> None:
    rt = gpu.reused(2)
    restarts = rt.counters["restarts"]

    def body(x: Any) -> Any:
        import cupy

        return cupy.empty(1 << 40)

    with pytest.raises(MemoryError, match=r"out of device memory, 67108864 of 17179869184 bytes are free.*num_slices"):
        rt.function(body)(np.ones(2))
    pids = rt.function(lambda row: os.getpid(), outputs=None)(np.ones(2))
    assert rt.counters["restarts"] == restarts
    assert len(set(pids)) == 2


def test_a_poisoned_device_gets_a_new_worker(gpu: Any, capfd: Any) -> None:
    rt = gpu(2)

    def body(x: Any) -> Any:
        import cupy

        if synk.comm.rank == 1:
            cupy.cuda.fail_launch()
        return x.sum()

    with pytest.raises(synk.errors.WorkerDied, match="reports errors to every call from now on") as caught:
        rt.function(body, outputs="sum")(np.ones(4))
    assert caught.value.ranks == (1,)
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4.0
    assert rt.counters["restarts"] == 1


def test_a_death_while_the_others_are_in_nccl(gpu: Any) -> None:
    rt = gpu.reused(3)

    def body(x: Any) -> Any:
        from synk._wire.cell import cell
        from synk.communicators import Buffer

        if synk.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group = cell.worker.peers.group  # type: ignore[union-attr]
        buffer = Buffer(x.data.ptr, 1, "float64")
        group.communicator.all_reduce(buffer, buffer, "sum", stream=5000)  # without the agreement before it
        return 1.0

    started = time.monotonic()
    with pytest.raises(synk.errors.WorkerDied) as caught:
        rt.function(body)(np.ones(3))
    assert caught.value.ranks == (1,)
    assert time.monotonic() - started < 10
    got = rt.function(lambda x: np.full(LARGE * 4, 1.0), outputs="sum")(np.ones(3))
    assert (got == 3.0).all()
    assert rt._session.group.is_usable(rt._session.workers)


def test_a_rank_that_fails_before_a_reduction_frees_the_others(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = gpu(2)

    def sabotage(row: Any) -> None:
        from synk._wire.cell import cell

        if synk.comm.rank == 1:
            collectives = cell.worker.executor.outputs.large.collectives  # type: ignore[union-attr]

            def fail(items: Any) -> Any:
                raise MemoryError("no room for a block")

            collectives.reduce_blocks = fail

    rt.function(sabotage, outputs=None)(np.ones(2))
    f = rt.function(lambda x: np.full(LARGE * 4, 1.0), outputs="sum")
    with pytest.raises(MemoryError, match="no room for a block"):
        f(np.ones(2))
    assert (f(np.ones(2)) == 2.0).all()  # in a group of its own
    assert rt.counters["restarts"] == 0


# -- comm ------------------------------------------------------------------------------------------------------------


def test_ranks_count_within_the_call(gpus: Gpus) -> None:
    """Whether NCCL joins them, where all take part, or not."""
    rt = gpus.reused(3)

    def body(x: Any) -> Any:
        comm = synk.comm
        rank, size, out = comm.rank, comm.world_size, x.copy()
        request = comm.irecv((rank - 1) % size, 1, out=out)
        comm.isend(x, (rank + 1) % size, 1)
        last, reduced = comm.broadcast(x[:1], size - 1), comm.reduce(x.sum(axis=0), "sum", size - 1)
        comm.send(x + 1, (rank + 1) % size)
        received = comm.recv((rank - 1) % size)
        assert request.wait() is out
        assert (reduced is None) == (rank != size - 1)
        return out, received, last + 0 * x, comm.all_reduce(x.sum(axis=0), "sum") + 0 * x

    f = rt.function(body, outputs="gather")
    for rows in (1, 2, 3, 6):
        x = np.arange(2.0 * rows).reshape(rows, 2)
        for call, size in ((f, min(rows, 3)), (f.serial, 1)):
            before, more, last, total = call(x)
            np.testing.assert_array_equal(before, np.roll(x, rows // size, axis=0))
            np.testing.assert_array_equal(more, before + 1)
            np.testing.assert_array_equal(last, np.broadcast_to(x[rows - rows // size], x.shape))
            np.testing.assert_array_equal(total, np.broadcast_to(x.sum(axis=0), x.shape))


def test_collectives_inside_functions(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    x = np.arange(18.0).reshape(9, 2)

    def body(x: Any) -> dict[str, Any]:
        comm = synk.comm
        after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        comm.send(x, after)
        received = comm.recv(before, like=x)
        comm.barrier()
        return {
            "sum": comm.all_reduce(x.sum(axis=0), "sum"),
            "avg": comm.all_reduce(x.mean(axis=0)),
            "nan": comm.all_reduce(x[0] * (float("nan") if comm.rank == 1 else 1.0), "max"),
            "stack": comm.all_gather(x),
            "root": comm.broadcast(x, 1),
            "block": comm.reduce_scatter(x),
            "received": received,
            "reduced": -1.0 if (total := comm.reduce(x[0], "sum", 2)) is None else total.sum(),
        }

    got = rt.function(body, outputs=None)(x)
    thirds = x.reshape(3, 3, 2)
    for rank in range(3):
        np.testing.assert_array_equal(got[rank]["sum"], x.sum(axis=0))
        np.testing.assert_allclose(got[rank]["avg"], x.mean(axis=0), rtol=1e-12)
        assert np.isnan(got[rank]["nan"]).all()
        np.testing.assert_array_equal(got[rank]["stack"], thirds)
        np.testing.assert_array_equal(got[rank]["root"], thirds[1])
        np.testing.assert_array_equal(got[rank]["block"], thirds.sum(axis=0)[rank : rank + 1])
        np.testing.assert_array_equal(got[rank]["received"], thirds[rank - 1])
    assert [float(each["reduced"]) for each in got] == [-1.0, -1.0, thirds[:, 0].sum()]


def test_a_sum_that_is_started_runs_beside_the_function(gpus: Gpus) -> None:
    """With NCCL, on a stream that the stand-in runs when somebody waits for it; it is there wherever it is needed."""
    rt = gpus.reused(3)

    def body(x: Any) -> dict[str, Any]:
        import cupy

        comm = synk.comm

        def own() -> Any:
            return cupy.zeros(4, "float32") + comm.rank + 1

        def start(array: Any, op: str = "sum") -> Any:
            request = comm.iall_reduce(array, op, out=array)
            comm.barrier()  # the ranks have agreed on all that was started before it
            return request

        threaded = own()
        thread = threading.Thread(target=lambda: start(threaded))  # as autograd's, which run the hooks of parameters
        thread.start()
        thread.join()
        from_thread = threaded.copy()
        polled = own()
        request = start(polled)
        answers = [request.test(), request.test()]
        polled = polled.copy()
        waited, first, second, left = own(), own(), own(), own()
        request = start(waited)
        early = waited.copy()
        assert request.wait() is waited
        late = waited.copy()
        before = start(first), start(second)
        blocking = comm.all_reduce(own(), "sum")  # behind both
        sums = first.copy() + second.copy()
        assert [each.wait() is not None for each in before] == [True, True]
        halves = (own() / 2).astype("float16")
        start(halves).wait()
        largest = own() * (float("nan") if comm.rank == 1 else 1.0)
        start(largest, "max").wait()
        start(left)  # and the function ends
        start(own())  # of which nobody keeps the array
        return {
            "from_thread": from_thread, "answers": answers, "polled": polled, "early": early, "late": late,
            "waited": waited, "sums": sums, "blocking": blocking,
            "halves": halves, "largest": largest, "left": left,
        }  # fmt: skip

    got = rt.function(body, outputs=None)(np.arange(3))
    for rank in range(3):
        for name in ("from_thread", "early"):
            assert got[rank][name].tolist() == [rank + 1 if gpus.has_nccl else 6] * 4, name
        assert got[rank]["answers"] == [not gpus.has_nccl, True]
        for name, value in (
            ("polled", 6),
            ("late", 6),
            ("waited", 6),
            ("blocking", 6),
            ("sums", 12),
            ("halves", 3),
            ("left", 6),
        ):
            assert got[rank][name].tolist() == [value] * 4, name
        assert np.isnan(got[rank]["largest"]).all()


@pytest.mark.parametrize("failing", [{1}, {0, 1, 2}])
def test_a_rank_that_raises_with_sums_started_leaves_nobody_waiting(gpus: Gpus, failing: set[int]) -> None:
    """The others may have given them to NCCL, where they would wait for ever."""
    rt = gpus.reused(3)

    def body(x: Any) -> Any:
        import cupy

        array = cupy.zeros(4, "float32")
        requests = [synk.comm.iall_reduce(array, "sum", out=array) for _ in range(3)]
        if synk.comm.rank in failing:
            raise KeyError("mine")
        return [request.wait() for request in requests][-1]

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            rt.function(body, outputs=None)(np.arange(3), timeout=20)
        assert rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")(np.ones(9)) == 9.0


def test_ranks_that_disagree_are_told(gpus: Gpus) -> None:
    rt = gpus.reused(3)

    def body(x: Any) -> Any:
        return synk.comm.all_reduce(x if synk.comm.rank else x[:1], "sum")

    with pytest.raises(synk.errors.CollectiveMismatch):
        rt.function(body, outputs=None)(np.ones(9))
    assert rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")(np.ones(9)) == 9.0


# -- shared variables ------------------------------------------------------------------------------------------------


def scaler(rt: synk.Runtime, variable: Any) -> Any:
    """Return a function that multiplies the variable by rank + 1."""

    def body(x: Any) -> Any:
        assert type(variable.value).__module__ == "cupy"
        variable.value = variable.value * (synk.comm.rank + 1)
        return x.sum()

    return rt.function(body, outputs="sum")


@pytest.mark.parametrize("count", [4, LARGE])
def test_variables_are_on_the_device_until_they_are_read(gpus: Gpus, count: int) -> None:
    rt = gpus.reused(3)
    start = np.arange(1.0, count + 1)
    w = rt.shared(start, name="w")
    scale = scaler(rt, w)
    scale(np.ones(3))
    scale(np.ones(3))
    assert w._referent.is_stale == [True] * 3
    np.testing.assert_array_equal(rt.gather(w), start * np.array([[1], [4], [9]]))
    assert w._referent.is_stale == [False] * 3
    scale(np.ones(3))
    rt.all_reduce(w, "sum")
    assert w._referent.is_stale == [gpus.has_nccl] * 3
    np.testing.assert_array_equal(rt.gather(w), np.stack([start * 36] * 3))
    scale(np.ones(3))
    rt.broadcast(w)
    np.testing.assert_array_equal(rt.get_value(w, 2), start * 36)
    rt.set_value(w, start)
    scale(np.ones(3))
    rt.all_gather(w)
    assert rt.get_lengths(w) == [3 * count] * 3
    np.testing.assert_array_equal(rt.get_value(w, 1), np.concatenate([start, start * 2, start * 3]))
    scale(np.ones(3))
    np.testing.assert_array_equal(rt.reduce(w, "max", in_place=False)[:count], start * 3)


def test_a_failed_call_changes_no_variable(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    w = rt.shared(np.ones(4), name="w")
    scaler(rt, w)(np.ones(3))

    def body(x: Any) -> Any:
        w.value = w.value + 100
        if synk.comm.rank == 1:
            raise KeyError("no")
        return x.sum()

    with pytest.raises(KeyError):
        rt.function(body)(np.ones(3))
    np.testing.assert_array_equal(rt.gather(w)[:, 0], [1, 2, 3])


def test_idle_ranks_follow(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    w = rt.shared(np.ones(LARGE), name="w")
    scaler(rt, w)(np.ones(3))

    def body(x: Any) -> Any:
        w.value = w.value + 10
        return x.sum()

    rt.function(body, outputs="sum")(np.ones(1))
    np.testing.assert_array_equal(rt.gather(w)[:, 0], [11, 11, 11])


def test_repeated_runs_on_devices(gpu: Gpus) -> None:
    """Values stay on the devices from run to run, and a buffer that the function assigns again is copied."""
    rt = gpu.reused(2)
    w = rt.shared(np.arange(4.0), name="w")
    f = rt.function(lambda x: (x.sum(), w.value[::-1] + 1), updates=[w], outputs="sum")
    assert float(f.repeat(3, np.ones(5))) == 5
    np.testing.assert_array_equal(w.value, np.arange(4.0)[::-1] + 3)
    held: list[Any] = []

    def shift(x: Any) -> Any:
        import cupy

        if not held:
            held.append(cupy.empty(4))
        held[0][0] = w.value[3]
        for k in range(1, 4):
            held[0][k] = w.value[k - 1]
        w.value = held[0]
        return x.sum()

    rt.function(shift, outputs="sum").repeat(2, np.ones(5))
    np.testing.assert_array_equal(w.value, np.roll(np.arange(4.0)[::-1] + 3, 2))


def test_shards_and_updates(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    rows = np.arange(20.0).reshape(10, 2)
    x = rt.shared(rows, sharded=True, name="x")
    total = rt.shared({"sum": np.zeros(2), "count": np.zeros((), np.int64)}, name="total")
    scaler(rt, x)(np.ones(3))
    value = rows * np.repeat([1, 2, 3], [4, 3, 3])[:, None]
    np.testing.assert_array_equal(x.value, value)

    def body(x: Any) -> Any:
        return x * 1.0, {"sum": x.sum(axis=0), "count": total.value["count"] + len(x)}

    f = rt.function(body, outputs="gather", updates=[(total, "sum")])
    for batch in (None, [9, 0, 4, 4], slice(8, 1, -3)):
        np.testing.assert_array_equal(f(x, batch=batch, num_slices=2), value if batch is None else value[batch])
    assert total.value["sum"].shape == (2,)


def first_refusal(call: Callable[[], Any]) -> synk.errors.WorkerDied:
    """Return the error of the first call after a death that finds values missing; one before it may meet the death."""
    while True:
        try:
            call()
        except synk.errors.WorkerDied as error:
            if error.phase == "recover":
                return error


def test_replicas_that_agree_come_back_and_others_are_lost(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    alike, own, shard = rt.shared(np.ones(5), name="alike"), rt.shared(np.ones(5), name="own"), None
    shard = rt.shared(np.arange(6.0), sharded=True, name="shard")
    untouched = rt.shared(np.arange(3.0), name="untouched")

    def body(x: Any) -> Any:
        alike.value = alike.value + 1
        own.value = own.value * (synk.comm.rank + 1)
        shard.value = shard.value * 2
        return x.sum()

    f = rt.function(body, outputs="sum")
    f(np.ones(3))
    pids = rt.function(lambda row: os.getpid(), outputs=None)(np.ones(3))
    os.kill(pids[1], signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        error = first_refusal(lambda: f(np.ones(3)))
    assert "the value of 'own' of rank 1; 'shard' of rank 1" in str(error)
    np.testing.assert_array_equal(rt.gather(untouched), np.stack([np.arange(3.0)] * 3))
    assert len({value.tobytes() for value in rt.gather(alike)}) == 1
    with pytest.raises(synk.errors.WorkerDied, match="cannot read variable 'own'"):
        rt.gather(own)
    rt.broadcast(own)
    rt.scatter(shard, np.arange(6.0))
    f(np.ones(3))
    np.testing.assert_array_equal(shard.value, np.arange(6.0) * 2)


# -- calls on trial, and rows of variables --------------------------------------------------------------------------


def test_closed_over_shards_are_divided_and_verified(gpu: Any) -> None:
    rt = gpu.reused(2)
    value = np.arange(10.0).reshape(5, 2)
    s = rt.shared(value, sharded=True)
    f = rt.function(lambda w: ((s.value * w).mean(axis=0), s.value), bcast_inputs="w", outputs=("avg", "gather"))
    for got in (f(2.0), f.serial(2.0), f.submit(2.0).result(), f(2.0)):
        np.testing.assert_allclose(got[0], 2 * value.mean(axis=0))
        np.testing.assert_array_equal(got[1], value)
    assert f.verify(2.0)


class OfRows(synk.Op):
    concatenates = True

    def finish(self, value: Any) -> Any:
        assert type(value) is np.ndarray
        return np.median(value, axis=0)


class OfValues(synk.Op):
    def combine(self, values: list[Any], rows: list[int]) -> Any:
        assert all(type(value) is np.ndarray for value in values)
        return np.average(values, axis=0, weights=rows)


def test_ops_of_a_users_own_get_arrays_of_the_host(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    for columns in (2, LARGE):
        f = rt.function(lambda x: (2 * x, x.sum(axis=0) / len(x)), outputs=(OfRows(), OfValues()), name="f")
        x = np.random.default_rng(0).normal(size=(7, columns))
        for call in (f, f, lambda x, f=f: f(x, num_slices=2), lambda x, f=f: f.submit(x).result(), f.serial):
            median, mean = call(x)
            np.testing.assert_array_equal(median, np.median(2 * x, axis=0))
            np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-12, atol=1e-12)


def test_nothing_of_a_comparison_is_left_on_the_devices(gpu: Any) -> None:
    rt = gpu.reused(2)
    w = rt.shared(np.zeros(3))
    x = np.arange(18.0).reshape(6, 3)

    def step(x: Any) -> Any:
        w.value = w.value + 1
        return x.sum(axis=0)

    wrong = rt.function(step)
    with pytest.raises(synk.errors.OpMismatch, match="gather"):
        rt.function(lambda x: 2 * x)(np.arange(24.0).reshape(8, 3))
    with pytest.raises(synk.errors.OpMismatch, match="sum"):
        rt.function(lambda x: x.sum())(np.arange(24.0))
    assert wrong.verify(x).outputs[0].matching == ("sum",)
    np.testing.assert_array_equal(w.value, np.zeros(3))
    np.testing.assert_allclose(wrong(x), x.sum(axis=0) / 2)
    np.testing.assert_array_equal(w.value, np.ones(3))


# -- NCCL that starts and does not work -------------------------------------------------------------------------------


FAULTS = {
    "refuse": "cannot join an NCCL group as rank 0 of 2: got ncclSystemError",
    "fail": "cannot all_reduce 262144 int32 by 'sum': got ncclSystemError",
    "hang": "cannot finish a collective: got ncclTimeout",
    "wrong": "cannot prove the group: got ncclInternalError (3): 262144 of 262144 sums are wrong",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_group_that_does_not_work_is_found_when_it_is_made(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Calls then go through host memory, with one warning."""
    monkeypatch.setenv("SYNK_FAKE_NCCL", fault)
    monkeypatch.setenv("SYNK_FAKE_PROOF_S", "1")
    rt = gpu(2)
    f = rt.function(lambda x: x[:1].repeat(LARGE * 4) + 1, outputs="sum")
    for _ in range(3):
        assert (f(np.arange(2.0), timeout=60) == 3.0).all()
    (warning,) = [record.getMessage() for record in caplog.records if "NCCL" in record.getMessage()]
    assert FAULTS[fault] in warning
    assert FAULTS[fault] in rt.info()
    assert not rt.counters["restarts"]


def test_a_group_that_works_again_is_used_again(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that hangs after the proof ends with the call's limit, on the workers that were there."""
    monkeypatch.setenv("SYNK_FAKE_NCCL", "hang 2")
    rt = gpu(2)
    f = rt.function(lambda x: x[:1].repeat(LARGE * 4) + 1, outputs="sum")
    pids = rt.function(lambda row: os.getpid(), outputs=None)
    before = pids(np.ones(2))
    with pytest.raises(synk.errors.CallTimeout):
        f(np.arange(2.0), timeout=1)
    assert (f(np.arange(2.0)) == 3.0).all()
    assert pids(np.ones(2)) == before
    assert "NCCL: nccl by fake" in rt.info()


def test_a_start_that_sticks_in_the_driver_ends(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even NCCL's abort ends the first collective, the workers are replaced."""
    monkeypatch.setenv("SYNK_FAKE_NCCL", "stick")
    monkeypatch.setenv("SYNK_FAKE_PROOF_S", "1")
    monkeypatch.setattr("synk._master.state.nccl_group.JOIN_TIMEOUT_S", 10.0)
    rt = gpu(2)
    f = rt.function(lambda x: x[:1].repeat(LARGE * 4) + 1, outputs="sum")
    with pytest.raises(synk.errors.CallTimeout, match="NCCL"):
        f(np.arange(2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the workers were replaced
        assert (f(np.arange(2.0)) == 3.0).all()
