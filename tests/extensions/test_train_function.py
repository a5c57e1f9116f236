"""The training recipe: on a small fake of the runtime first, then on workers."""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from support.small_network import batch, loss_and_grad, start

import synk
from synk.extensions.train_function import make_train_function
from synk.extensions.updates import adam, momentum, sgd

# ----- a model, and its training by torch alone on the whole batch


def torch_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight, bias = params["hidden"]
    return ((torch.tanh(x @ weight + bias) @ params["out"] - y) ** 2).mean()


def torch_loss_and_grad(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    grads, loss = torch.func.grad_and_value(torch_loss)(params, x, y)
    return loss, grads


def trained_by_torch(
    make: Callable[..., torch.optim.Optimizer], batches: list[int], clip_norm: float | None = None
) -> tuple[list[float], Any]:
    """Return the loss before each step and the parameters at the end."""
    params = optree.tree_map(lambda leaf: torch.tensor(leaf, requires_grad=True), start())
    leaves = optree.tree_leaves(params)
    optimizer = make(leaves)
    losses = []
    for num_rows in batches:
        optimizer.zero_grad()
        loss = torch_loss(params, *map(torch.tensor, batch(num_rows)))
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, optree.tree_map(lambda leaf: leaf.detach().numpy(), params)


def assert_same(tree: Any, expected: Any) -> None:
    """Assert that two trees agree up to rounding."""
    assert optree.tree_structure(tree) == optree.tree_structure(expected)
    for leaf, other in zip(optree.tree_leaves(tree), optree.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-14)


# ----- a fake: ranks are threads, one call at a time


def copied(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).copy()


class FakeShared:
    """One replica per rank; a rank sees read-only arrays of the function's library."""

    def __init__(self, runtime: FakeRuntime, value: Any) -> None:
        self._runtime = runtime
        self.replicas = [optree.tree_map(copied, value) for _ in range(runtime.world_size)]

    @property
    def value(self) -> Any:
        runtime = self._runtime
        replica = self.replicas[getattr(runtime.local, "rank", 0)]
        for leaf in optree.tree_leaves(replica):
            leaf.flags.writeable = False
        return optree.tree_map(runtime.to_framework, replica) if hasattr(runtime.local, "rank") else replica

    @value.setter
    def value(self, new: Any) -> None:
        rank = getattr(self._runtime.local, "rank", None)
        for position in range(len(self.replicas)) if rank is None else (rank,):
            self.replicas[position] = optree.tree_map(copied, new)


class FakeRuntime:
    """What `make_train_function` uses of synk, in one process; also what ``synk.comm`` is inside a function."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.local = threading.local()
        self.shares: list[int] = []
        self.collectives: list[tuple[str, int]] = []
        self.steps: list[Callable[..., Any]] = []
        self.to_framework: Callable[[Any], Any] = np.asarray

    @property
    def rank(self) -> int:
        return self.local.rank

    @property
    def rows(self) -> int:
        return self.shares[self.rank]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, share in enumerate(self.shares) if share)

    def shared(self, value: Any, name: str) -> FakeShared:
        return FakeShared(self, value)

    def get_value(self, variable: FakeShared, rank: int) -> Any:
        return variable.replicas[rank]

    def all_reduce(self, array: Any, op: str) -> Any:
        """Return the mean of all ranks' arrays, weighted by their rows."""
        assert op == "avg"
        self._posted[self.rank] = np.asarray(array)
        if self._barrier.wait() == 0:
            self.collectives.append((str(array.dtype), array.shape[0]))
        total = sum(array * self.shares[rank] for rank, array in sorted(self._posted.items())) / sum(self.shares)
        self._barrier.wait()
        return self.to_framework(np.asarray(total, self._posted[self.rank].dtype))

    def function(
        self, step: Callable[..., Any], *, bcast_inputs: Any, outputs: Any, framework: str | None, name: str
    ) -> Callable[..., Any]:
        """Return a function that scatters rows to threads and combines what they return."""
        assert outputs == ("avg", "first", "first")
        self.steps.append(step)
        names = list(inspect.signature(step).parameters)
        self.to_framework = {None: np.asarray, "torch": lambda leaf: torch.tensor(np.asarray(leaf))}[framework]

        def call(*inputs: Any, **named: Any) -> tuple[Any, int, int]:
            arguments = {**dict(zip(names, inputs, strict=False)), **named}
            num_rows = len(next(value for key, value in arguments.items() if key not in bcast_inputs))
            parts = np.array_split(np.arange(num_rows), self.world_size)
            self.shares = [len(part) for part in parts]
            ranks = [rank for rank, share in enumerate(self.shares) if share]
            self._barrier, self._posted, results, errors = threading.Barrier(len(ranks), timeout=30), {}, {}, []

            def run(rank: int) -> None:
                self.local.rank = rank
                own = {k: v if k in bcast_inputs else self.to_framework(v[parts[rank]]) for k, v in arguments.items()}
                try:
                    results[rank] = step(**own)
                except threading.BrokenBarrierError:
                    pass  # another rank failed
                except Exception as error:
                    errors.append(error)
                    self._barrier.abort()

            threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            weights = [self.shares[rank] / num_rows for rank in ranks]
            losses, counts, firsts = zip(*(results[rank] for rank in ranks), strict=True)
            loss = optree.tree_map(lambda *leaves: float(np.dot(leaves, weights)), *losses)
            return loss, counts[0], firsts[0]

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeRuntime]:
    """Return a maker of fakes, which take the place of synk's verbs."""

    def make(world_size: int) -> FakeRuntime:
        runtime = FakeRuntime(world_size)
        monkeypatch.setattr(synk, "current", lambda: runtime)
        monkeypatch.setattr(synk, "comm", runtime)
        return runtime

    return make


# ----- the recipe on the fake

BATCHES = [10, 7, 7, 12, 5, 9]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_slices", [1, 2, 5])
def test_training_is_that_of_torch_on_the_whole_batch(
    fake: Callable[[int], FakeRuntime], world_size: int, num_slices: int
) -> None:
    fake(world_size)
    train = make_train_function(loss_and_grad, start(), adam(0.05), clip_norm=1.0, num_slices=num_slices)
    losses = [train(*batch(num_rows)) for num_rows in BATCHES]
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.Adam(leaves, lr=0.05), BATCHES, 1.0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    assert len(train.params.replicas) == world_size
    for replica in train.params.replicas:
        assert_same(replica, expected)
    assert train.state.value["step"] == len(BATCHES)


def test_ranks_without_rows_are_brought_up_to_date(fake: Callable[[int], FakeRuntime]) -> None:
    fake(4)
    train = make_train_function(loss_and_grad, start(), momentum(0.05))
    batches = [6, 2, 1, 8]
    losses = [train(*batch(num_rows)) for num_rows in batches]
    expected_losses, expected = trained_by_torch(lambda ls: torch.optim.SGD(ls, lr=0.05, momentum=0.9), batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for replica, state in zip(train.params.replicas, train.state.replicas, strict=True):
        assert_same(replica, expected)
        assert state["step"] == len(batches)


def test_gradients_travel_in_one_buffer_per_dtype(fake: Callable[[int], FakeRuntime]) -> None:
    runtime = fake(2)
    train = make_train_function(loss_and_grad, start(), sgd(0.1))
    train(*batch(6))
    assert runtime.collectives == [("float64", 4 * 3 + 3 + 3)]

    def mixed(params: Any, x: np.ndarray) -> tuple[float, Any]:
        return 0.0, [np.ones(2, "float32"), np.ones((2, 2)), np.ones(1, "float32")]

    runtime.collectives.clear()
    make_train_function(mixed, mixed(None, np.ones(1))[1], sgd(0.1))(np.ones(6))
    assert sorted(runtime.collectives) == [("float32", 3), ("float64", 4)]


@pytest.mark.parametrize("num_slices", [1, 2])
def test_torch_tensors_all_the_way(fake: Callable[[int], FakeRuntime], num_slices: int) -> None:
    fake(2)
    seen: list[bool] = []

    def spying(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        seen.extend(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves((params, x, y)))
        return torch_loss_and_grad(params, x, y)

    train = make_train_function(spying, start(), adam(0.05), framework="torch", clip_norm=1.0, num_slices=num_slices)
    losses = [train(*batch(num_rows)) for num_rows in BATCHES]
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.Adam(leaves, lr=0.05), BATCHES, 1.0)
    assert all(seen)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    assert_same(train.params.value, expected)


@pytest.mark.parametrize("bcast_inputs", ["scale", ("scale",)])
def test_inputs_go_by_position_or_name_whole_or_in_rows(fake: Callable[[int], FakeRuntime], bcast_inputs: Any) -> None:
    fake(2)

    def scaled(params: Any, x: np.ndarray, *, scale: np.ndarray, power: int = 1) -> tuple[dict[str, float], Any]:
        assert scale.shape == (3,)
        value = float(x.mean() * scale.sum() ** power)
        return {"loss": value, "rows": 0.5}, {"w": np.full(2, value)}

    train = make_train_function(
        scaled, {"w": np.zeros(2)}, sgd(1.0), bcast_inputs=bcast_inputs, num_slices=2, name="fit"
    )
    x, scale = np.arange(7.0), np.ones(3)
    assert train(x, scale=scale) == {"loss": pytest.approx(9.0), "rows": pytest.approx(0.5)}
    assert train(x=x, scale=scale)["loss"] == pytest.approx(9.0)
    np.testing.assert_allclose(train.params.value["w"], -18.0)


def test_step_shows_the_inputs_and_the_name(fake: Callable[[int], FakeRuntime]) -> None:
    runtime = fake(1)
    make_train_function(loss_and_grad, start(), sgd(), name="fit")
    make_train_function(lambda *everything: (0.0, everything[0]), start(), sgd())
    assert [(step.__name__, str(inspect.signature(step))) for step in runtime.steps] == [
        ("fit", "(x, y)"),
        ("train", "(*everything)"),
    ]


def test_a_step_that_fails_changes_nothing(fake: Callable[[int], FakeRuntime]) -> None:
    fake(2)

    def failing(params: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, Any]:
        if math.isnan(x[0, 0]):
            raise ArithmeticError("not a number")
        return loss_and_grad(params, x, y)

    train = make_train_function(failing, start(), adam(0.05))
    x, y = batch(6)
    broken = x.copy()
    broken[3:] = math.nan  # the rows of the second rank
    with pytest.raises(ArithmeticError, match="not a number"):
        train(broken, y)
    for replica, state in zip(train.params.replicas, train.state.replicas, strict=True):
        assert_same(replica, start())
        assert state["step"] == 0
    train(x, y)
    assert train.state.value["step"] == 1


def test_mistakes_are_named(fake: Callable[[int], FakeRuntime]) -> None:
    fake(2)
    with pytest.raises(ValueError, match="got num_slices=0, expected an integer of at least 1"):
        make_train_function(loss_and_grad, start(), sgd(), num_slices=0)
    with pytest.raises(ValueError, match="got a maximal norm of -1"):
        make_train_function(loss_and_grad, start(), sgd(), clip_norm=-1)
    with pytest.raises(TypeError, match=r"expected loss_and_grad\(params, \*inputs\)"):
        make_train_function(lambda: (0.0, {}), start(), sgd())
    with pytest.raises(TypeError, match=r"cannot initialise sgd: got params\['w'\] of dtype int64"):
        make_train_function(loss_and_grad, {"w": np.arange(3)}, sgd())
    train = make_train_function(loss_and_grad, start(), sgd())
    for option, value in {"num_slices": 2, "output_subset": [0]}.items():
        with pytest.raises(TypeError, match=f"cannot take a training step: got {option}="):
            train(*batch(4), **{option: value})
    wrong = make_train_function(lambda params, x: (0.0, {"w": np.ones(1)}), {"w": np.ones(2)}, sgd())
    with pytest.raises(ValueError, match=r"got grads\['w'\] of shape \(1,\)"):
        wrong(np.ones(4))


# ----- the recipe on workers


@pytest.fixture
def workers(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | str], synk.Runtime]:
    """Return a maker of current runtimes."""

    def make(num_workers: int | str) -> synk.Runtime:
        runtime = shared_runtimes[num_workers]
        monkeypatch.setattr(synk, "current", lambda: runtime)
        return runtime

    return make


@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.sampled(3)
def test_workers_train_as_torch_does_on_the_whole_batch(
    workers: Callable[[int | str], synk.Runtime], num_workers: int | str, num_slices: int
) -> None:
    runtime = workers(num_workers)
    train = make_train_function(loss_and_grad, start(), adam(0.05), clip_norm=1.0, num_slices=num_slices)
    losses = [train(*batch(num_rows)) for num_rows in BATCHES]
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.Adam(leaves, lr=0.05), BATCHES, 1.0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for rank in range(runtime.world_size):
        assert_same(runtime.get_value(train.params, rank=rank), expected)
        assert runtime.get_value(train.state, rank=rank)["step"] == len(BATCHES)


def test_workers_without_rows_are_brought_up_to_date(workers: Callable[[int | str], synk.Runtime]) -> None:
    runtime = workers(3)
    train = make_train_function(loss_and_grad, start(), momentum(0.05))
    batches = [6, 2, 1, 8]
    losses = [train(*batch(num_rows)) for num_rows in batches]
    expected_losses, expected = trained_by_torch(lambda ls: torch.optim.SGD(ls, lr=0.05, momentum=0.9), batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for rank in range(3):
        assert_same(runtime.get_value(train.params, rank=rank), expected)


def test_resident_rows_of_one_rank_train_all(workers: Callable[[int | str], synk.Runtime]) -> None:
    runtime = workers(3)
    inputs, targets = batch(9)
    x, y = runtime.shared(inputs, sharded=True), runtime.shared(targets, sharded=True)
    train = make_train_function(loss_and_grad, start(), momentum(0.05))
    own = slice(6, 9)  # rows that the last rank holds
    loss, grads = loss_and_grad(start(), inputs[own], targets[own])
    assert float(train(x, y, batch=own)) == pytest.approx(loss)
    rule = momentum(0.05)
    expected, expected_state = rule.step(start(), grads, rule.init(start()))
    for rank in range(3):
        assert_same(runtime.get_value(train.params, rank=rank), expected)
        assert_same(runtime.get_value(train.state, rank=rank), expected_state)


@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
def test_steps_of_every_kind_are_steps(workers: Callable[[int | str], synk.Runtime], num_workers: int | str) -> None:
    """Waited for or not, on all workers or on one, with rows for all ranks or for some: as torch on the whole batch."""
    runtime = workers(num_workers)
    train = make_train_function(loss_and_grad, start(), adam(0.05), clip_norm=1.0)
    params = train.params
    sizes = [9, 7, 1, 8, 2, 6, 1, 5, 4]
    losses: list[Any] = []
    for number, num_rows in enumerate(sizes):
        kind = (train, train.submit, train.serial)[number % 3]
        losses.append(kind(*batch(num_rows)))
        if number % 4 == 3:
            assert train.verify(*batch(5))  # takes no step
    losses = [loss.result() if hasattr(loss, "result") else loss for loss in losses]
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.Adam(leaves, lr=0.05), sizes, 1.0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for rank in range(runtime.world_size):
        assert_same(runtime.get_value(params, rank=rank), expected)


def test_three_submitted_steps_and_what_reads_the_parameters_next(
    workers: Callable[[int | str], synk.Runtime],
) -> None:
    runtime = workers(3)
    train = make_train_function(loss_and_grad, start(), sgd(0.05))
    params = train.params
    evaluate = runtime.function(lambda x, y: loss_and_grad(params.value, x, y)[0])
    sizes = [6, 1, 8]
    calls = [train.submit(*batch(num_rows)) for num_rows in sizes]
    value = evaluate(*batch(9))  # before anybody has asked for a result
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.SGD(leaves, lr=0.05), sizes)
    np.testing.assert_allclose(value, loss_and_grad(expected, *batch(9))[0], rtol=1e-10)
    assert [call.ranks for call in calls] == [(0, 1, 2), (0,), (0, 1, 2)]
    np.testing.assert_allclose([call.result() for call in calls], expected_losses, rtol=1e-10)
    np.testing.assert_allclose([call.result() for call in calls], expected_losses, rtol=1e-10)


def test_a_stream_of_steps_goes_on_from_each_step(workers: Callable[[int | str], synk.Runtime]) -> None:
    """Also after a step in which some ranks have no rows: they get its result before the next step is sent."""
    runtime = workers(3)
    train = make_train_function(loss_and_grad, start(), sgd(0.05))
    sizes = [6, 1, 8, 2, 5]
    losses = list(train.stream(batch(num_rows) for num_rows in sizes))
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.SGD(leaves, lr=0.05), sizes)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for rank in range(3):
        assert_same(runtime.get_value(train.params, rank=rank), expected)


def test_a_submitted_step_that_fails_says_so_in_its_result(workers: Callable[[int | str], synk.Runtime]) -> None:
    runtime = workers(2)

    def fail(params: Any, x: Any) -> Any:
        raise ArithmeticError("no step")

    train = make_train_function(fail, start(), sgd(0.05))
    for num_rows in (4, 1):
        call = train.submit(np.ones(num_rows))
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no step"):
                call.result()
        assert call.done()
    for rank in range(2):
        assert_same(runtime.get_value(train.params, rank=rank), start())
    for kind in (train.submit, train.serial, train.verify):
        with pytest.raises(TypeError, match="got num_slices=2"):
            kind(np.ones(4), num_slices=2)


@pytest.mark.parametrize("num_slices", [1, 2])
def test_batches_may_be_nested(workers: Callable[[int | str], synk.Runtime], num_slices: int) -> None:
    workers(2)

    class Pair(NamedTuple):
        y: Any
        nothing: Any = None

    def nested(params: Any, fields: Any) -> Any:
        assert (fields["name"], fields["pair"].nothing, fields["scale"]) == ("text", None, 1.0)
        return loss_and_grad(params, fields["x"] * fields["scale"], fields["pair"].y)

    train = make_train_function(nested, start(), sgd(0.05), num_slices=num_slices)
    plain = make_train_function(loss_and_grad, start(), sgd(0.05))
    for num_rows in (7, 3, 1):
        x, y = batch(num_rows)
        loss = train(UserDict(x=x, pair=Pair(y), name="text", scale=np.array(1.0)))
        np.testing.assert_allclose(loss, plain(x, y), rtol=1e-10)
    assert_same(copy.deepcopy(train.params.value), copy.deepcopy(plain.params.value))


@pytest.mark.parametrize("num_slices", [1, 2])
def test_workers_train_with_torch_tensors(workers: Callable[[int | str], synk.Runtime], num_slices: int) -> None:
    workers(2)
    train = make_train_function(
        torch_loss_and_grad, start(), adam(0.05), framework="torch", clip_norm=1.0, num_slices=num_slices
    )
    losses = [float(train(*batch(num_rows))) for num_rows in BATCHES]
    expected_losses, expected = trained_by_torch(lambda leaves: torch.optim.Adam(leaves, lr=0.05), BATCHES, 1.0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    assert_same(copy.deepcopy(train.params.value), expected)


def test_batches_of_data_a_checkpoint_and_another_function(workers: Callable[[int | str], synk.Runtime]) -> None:
    runtime = workers(2)
    inputs, targets = batch(23)
    x, y = runtime.data(inputs), runtime.data(targets)
    train = make_train_function(loss_and_grad, start(), adam(0.05))
    params = train.params

    @runtime.function
    def evaluate(x: np.ndarray, y: np.ndarray) -> float:
        return loss_and_grad(params.value, x, y)[0]

    def epoch() -> list[float]:
        return [float(train(x, y, batch=slice(first, first + 8))) for first in range(0, 23, 8)]

    np.testing.assert_allclose(evaluate(x, y), loss_and_grad(start(), inputs, targets)[0])
    saved = train.params.value, train.state.value
    first = epoch()
    np.testing.assert_allclose(evaluate(x, y), loss_and_grad(train.params.value, inputs, targets)[0])
    train.params.value, train.state.value = saved
    assert epoch() == first


def test_workers_keep_their_parameters_when_a_step_fails(workers: Callable[[int | str], synk.Runtime]) -> None:
    runtime = workers(2)

    def failing(params: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, Any]:
        if math.isnan(x[0, 0]):
            raise ArithmeticError("not a number")
        return loss_and_grad(params, x, y)

    train = make_train_function(failing, start(), adam(0.05))
    x, y = batch(6)
    broken = x.copy()
    broken[3:] = math.nan  # the rows of the second rank
    with pytest.raises(ArithmeticError, match="not a number"):
        train(broken, y)
    for rank in range(2):
        assert_same(runtime.get_value(train.params, rank=rank), start())
    train(x, y)
    assert runtime.get_value(train.state, rank=1)["step"] == 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_run_goes_on_from_a_file_bit_for_bit(
    workers: Callable[[int | str], synk.Runtime], tmp_path: Any, num_workers: int
) -> None:
    workers(num_workers)

    def make() -> Any:
        return make_train_function(loss_and_grad, start(), adam(0.05), clip_norm=1.0)

    train = make()
    for num_rows in BATCHES[:3]:
        train(*batch(num_rows))
    saved = train.save(tmp_path / "run.npz", wait=False)
    expected = [float(train(*batch(num_rows))) for num_rows in BATCHES]
    assert saved is not None
    saved.result()
    again = make()
    again(*batch(5))
    again.load(tmp_path / "run.npz")
    assert again.state.value["step"] == 3
    assert [float(again(*batch(num_rows))) for num_rows in BATCHES] == expected
    assert_same(copy.deepcopy(again.params.value), copy.deepcopy(train.params.value))


def test_a_state_of_another_structure_is_refused(workers: Callable[[int | str], synk.Runtime], tmp_path: Any) -> None:
    workers(2)
    train = make_train_function(loss_and_grad, start(), adam(0.05))
    before = copy.deepcopy(train.params.value)
    other = make_train_function(loss_and_grad, start(), sgd(0.05))
    with pytest.raises(ValueError, match=r"cannot load train.state\['.*: got nothing, expected"):
        train.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"got the keys \['params'\], expected a dict with the keys"):
        train.load_state_dict({"params": {}})
    with pytest.raises(ValueError, match="got a list, expected a dict"):
        train.load_state_dict([])  # type: ignore[arg-type]
    state = train.state_dict()
    name = next(iter(state["params"]))
    state["params"][name] = state["params"][name].astype(np.float32)
    with pytest.raises(ValueError, match=r"got float32 of shape .*, expected float64 of shape"):
        train.load_state_dict(state)
    assert_same(copy.deepcopy(train.params.value), before)
    (tmp_path / "run.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="cannot load"):
        train.load(tmp_path / "run.npz")
