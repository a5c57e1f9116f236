"""Programs of PyTensor with messages on workers: the published orders, and the values of NumPy. Update rules.

The rules are compared with the optimizers of torch, with NumPy arrays, tensors, and arrays of CuPy.
"""

from __future__ import annotations

import doctest
import os
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import optree
import pytest
import rules
import torch

import synk

WHY = "needs PyTensor: `make test EXTRA=pytensor` installs it"
FLAGS = "cxx=,traceback__limit=0"
"""Nothing is compiled, and PyTensor makes no folder for it."""

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTENSOR_FLAGS", FLAGS)
    pytensor = pytest.importorskip("pytensor", reason=WHY)


def on_ranks(rt: synk.Runtime, program: Callable[[int], Any]) -> list[Any]:
    """Return what a program returns on each rank, which it is given."""

    def run(x: np.ndarray) -> bytes:
        os.environ.setdefault("PYTENSOR_FLAGS", FLAGS)  # before it is imported, here or by what is loaded
        return pickle.dumps(pickle.loads(packed)(synk.comm.rank))

    packed = cloudpickle.dumps(program)
    found = rt.function(run, outputs=None)(np.zeros(rt.world_size))
    return [pickle.loads(each) for each in found]


def shapes(n: int) -> list[tuple[int, int]]:
    return [(n, 1), (n, n), (n, n), (n, n), (n, 1)]


def kalman(rank: int, dtype: str, numeric_inputs: list[Any]) -> tuple[list[str], list[Any]]:
    """Update a Kalman filter on two ranks.

    The program of https://gist.github.com/mrocklin/3750410 with its imports changed.

    Returns
    -------
    nodes : list of str
        What the rank runs, in that order.
    values : list
    """
    import pytensor
    import pytensor.tensor.linalg as linalg
    from pytensor.compile.mode import Mode
    from pytensor.link.c.basic import OpWiseCLinker
    from theano_mpi import mpi_cmps, recv, send, sort_schedule_fn

    dot = pytensor.tensor.dot
    n = len(numeric_inputs[0])
    mpi_scheduler = sort_schedule_fn(*mpi_cmps)
    mpi_linker = OpWiseCLinker(schedule=mpi_scheduler)
    mpi_mode = Mode(linker=mpi_linker)
    if rank == 0:
        mu, Sigma, H, R, data = (
            pytensor.tensor.matrix(name, dtype=dtype) for name in ("mu", "Sigma", "H", "R", "data")
        )
        A = dot(Sigma, H.T)
        B = R + dot(H, dot(Sigma, H.T))
        new_mu = mu + dot(A, linalg.solve(B, dot(H, mu) - data))
        receipts = send(H, 1, 1), send(B, 1, 2), send(Sigma, 1, 3), send(A, 1, 4)
        new_Sigma = recv((n, n), dtype, 1, 5)
        f = pytensor.function((mu, Sigma, H, R, data), (new_mu, new_Sigma, *receipts), mode=mpi_mode)
    else:
        H = recv((n, n), dtype, 0, 1)
        B = recv((n, n), dtype, 0, 2)
        Sigma = recv((n, n), dtype, 0, 3)
        A = recv((n, n), dtype, 0, 4)
        new_Sigma = Sigma - dot(dot(A, linalg.solve(B, H)), Sigma)
        f = pytensor.function((), (send(new_Sigma, 0, 5),), mode=mpi_mode)
        numeric_inputs = []
    f(*numeric_inputs)
    values = f(*numeric_inputs)  # a second time with the same function
    return [str(node) for node in f.maker.linker.make_all()[-1]], values


# As published, with the names that PyTensor has today for Theano's operations. It makes one Gemm of the last product
# and difference of rank 1, which were two.
LISTED_0 = [
    "MPISend{dest: 1, tag: 1}(H)",
    "MPISend{dest: 1, tag: 3}(Sigma)",
    "MPIRecv{source: 1, tag: 5, shape: (30, 30), dtype: float32}()",
    "MatrixTranspose(H)",
    "Dot22(Sigma, H.T)",
    "MPISend{dest: 1, tag: 4}(Dot22.0)",
    "Gemm{no_inplace}(R, 1.0, H, Dot22.0, 1.0)",
    "MPISend{dest: 1, tag: 2}(Gemm{no_inplace}.0)",
    "Gemm{no_inplace}(data, 1.0, H, mu, -1.0)",
    "Solve(Gemm{no_inplace}.0, Gemm{no_inplace}.0)",
    "Gemm{no_inplace}(mu, 1.0, Dot22.0, Solve.0, 1.0)",
    "MPISendWait(MPISend{dest: 1, tag: 1}.0)",
    "MPISendWait(MPISend{dest: 1, tag: 2}.0)",
    "MPISendWait(MPISend{dest: 1, tag: 3}.0)",
    "MPISendWait(MPISend{dest: 1, tag: 4}.0)",
    "MPIRecvWait(MPIRecv{source: 1, tag: 5, shape: (30, 30), dtype: float32}.0)",
]
FROM_0 = [f"MPIRecv{{source: 0, tag: {tag}, shape: (30, 30), dtype: float32}}" for tag in (1, 2, 3, 4)]
LISTED_1 = [
    *(f"{start}()" for start in FROM_0),
    f"MPIRecvWait({FROM_0[0]}.0)",
    f"MPIRecvWait({FROM_0[1]}.0)",
    "Solve(MPIRecvWait.0, MPIRecvWait.0)",
    f"MPIRecvWait({FROM_0[3]}.0)",
    "Dot22(MPIRecvWait.0, Solve.0)",
    f"MPIRecvWait({FROM_0[2]}.0)",
    "Gemm{no_inplace}(MPIRecvWait.0, -1.0, Dot22.0, MPIRecvWait.0, 1.0)",
    "MPISend{dest: 0, tag: 5}(Gemm{no_inplace}.0)",
    "MPISendWait(MPISend{dest: 0, tag: 5}.0)",
]


def well_conditioned(n: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    root = rng.normal(size=(n, n))
    sigma, h, r = root @ root.T / n + np.eye(n), rng.normal(size=(n, n)) / n, np.eye(n)
    return [each.astype(dtype) for each in (rng.normal(size=(n, 1)), sigma, h, r, rng.normal(size=(n, 1)))]


def test_the_published_program(shared_runtimes: Any) -> None:
    args = well_conditioned(30, "float32")
    (nodes_0, values), (nodes_1, receipt) = on_ranks(shared_runtimes[2], lambda rank: kalman(rank, "float32", args))
    brackets = {node.partition("(")[0] for node in nodes_0 if node.startswith("Solve")}
    (solve,) = brackets  # with its options, which say nothing about the order
    assert [node.replace(solve, "Solve") for node in nodes_0] == LISTED_0
    assert [node.replace(solve, "Solve") for node in nodes_1] == LISTED_1
    mu, sigma, h, r, data = (each.astype(float) for each in args)
    b = r + h @ sigma @ h.T
    np.testing.assert_allclose(values[0], mu + sigma @ h.T @ np.linalg.solve(b, h @ mu - data), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(values[1], sigma - sigma @ h.T @ np.linalg.solve(b, h) @ sigma, rtol=1e-3, atol=1e-5)
    assert [*values[2:], *receipt] == [True] * 5


def tools() -> tuple[Any, Any, Any, Any, Any]:
    import pytensor
    import pytensor.tensor as pt
    from theano_mpi import mode, recv, send

    return pytensor, pt, send, recv, mode()


def test_constants_in_place_operations_and_messages_to_oneself(shared_runtimes: Any) -> None:
    def program(rank: int) -> Any:
        pytensor, pt, send, recv, mode = tools()
        x = pt.matrix("x", dtype="float64")
        y = 2 * x
        changed = pt.exp(y)  # in the memory of y, which is sent before
        got = recv((2, 2), "float64", 1 - rank, 3)
        own = recv((3,), "int64", rank, 0)
        outputs = [changed, got, own, send(y, 1 - rank, 3), send(pt.constant(np.arange(3)), rank, 0)]
        f = pytensor.function([x], outputs, mode=mode)
        return f(np.full((2, 2), rank + 1.0))

    for rank, (changed, got, own, *receipts) in enumerate(on_ranks(shared_runtimes[2], program)):
        np.testing.assert_array_equal(changed, np.exp(np.full((2, 2), 2 * (rank + 1.0))))
        np.testing.assert_array_equal(got, np.full((2, 2), 2 * (2 - rank)))
        np.testing.assert_array_equal(own, [0, 1, 2])
        assert receipts == [True, True]


def test_the_example() -> None:
    import theano_mpi

    assert doctest.testmod(theano_mpi).failed == 0


TWINS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "nesterov_momentum": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"rho": 0.8, "eps": 1e-4}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-4}),
    "adamax": (torch.optim.Adamax, {"betas": (0.8, 0.7), "eps": 1e-4}),
}
"""The optimizer of torch that each rule is, with settings that both have."""

Layer = namedtuple("Layer", ["weight", "bias"])


def start(dtype: str = "float64") -> Any:
    """Return parameters in every kind of nesting, a 0-d and an empty array among them."""
    random = np.random.default_rng(3)

    def array(*shape: int) -> np.ndarray:
        return np.asarray(random.uniform(-1, 1, shape), dtype)

    return {"layers": [Layer(array(3, 2), array(2)), (array(2, 2),)], "scale": array(), "no": array(0)}


def gradient(params: Any) -> Any:
    return optree.tree_map(lambda leaf: 3 * leaf**3 - leaf + 0.5, params)


def trained(rule: rules.Rule, params: Any, num_steps: int) -> list[Any]:
    state = rule.init(params)
    for _ in range(num_steps):
        params, state = rule.step(params, gradient(params), state)
    assert state["step"] == num_steps
    return optree.tree_leaves(params)


def test_a_rule_goes_the_way_of_torchs_optimizer(subtests: pytest.Subtests) -> None:
    """After it was sent to another process; on NumPy arrays and on tensors."""
    for name, (twin, settings) in TWINS.items():
        kept = {key: value for key, value in settings.items() if key != "nesterov"}
        rule = pickle.loads(cloudpickle.dumps(getattr(rules, name)(**kept, learning_rate=0.01, weight_decay=0.1)))
        tensors = [torch.tensor(leaf) for leaf in optree.tree_leaves(start())]
        optimizer = twin(tensors, **settings, lr=0.01, weight_decay=0.1)  # type: ignore[call-arg]
        for _ in range(10):
            for tensor in tensors:
                tensor.grad = gradient(tensor)
            optimizer.step()
        for params in (start(), optree.tree_map(torch.tensor, start())):
            with subtests.test(name=name, params=type(params["scale"]).__name__):
                for leaf, other in zip(trained(rule, params, 10), tensors, strict=True):
                    assert isinstance(leaf, torch.Tensor) == isinstance(params["scale"], torch.Tensor)
                    np.testing.assert_allclose(np.asarray(leaf), other.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.gpu
def test_cupy_arrays(runtime: Callable[..., Any]) -> None:
    """In a worker, for CUDA keeps descriptors for the life of a process."""

    def check(row: np.ndarray) -> None:
        import cupy

        for name in TWINS:
            rule = getattr(rules, name)(weight_decay=0.1)
            values = start("float32")
            params = optree.tree_map(cupy.asarray, values)
            state, expected_state = rule.init(params), rule.init(values)
            for _ in range(3):
                params, state = rule.step(params, gradient(params), state)
                values, expected_state = rule.step(values, gradient(values), expected_state)
            for leaf, expected in zip(optree.tree_leaves(params), optree.tree_leaves(values), strict=True):
                assert isinstance(leaf, cupy.ndarray)
                assert leaf.dtype == "float32"
                np.testing.assert_allclose(leaf.get(), expected, rtol=1e-5)

    runtime(1, backend="cupy").function(check, outputs=None)(np.ones(1))
