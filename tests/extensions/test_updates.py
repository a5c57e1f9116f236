"""Update rules against torch.optim, clipping against torch.nn.utils, and the promises that hold for every library."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import cloudpickle
import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import numpy as np
import optree
import pytest
import torch
from support.seeds import examples

from synk.extensions import updates

RULES = [
    updates.sgd,
    updates.momentum,
    updates.nesterov_momentum,
    updates.adagrad,
    updates.rmsprop,
    updates.adadelta,
    updates.adam,
    updates.adamax,
    updates.adamw,
]
TWINS: list[tuple[str, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", {}, torch.optim.SGD, {}),
    ("sgd", {"learning_rate": 2e-3, "weight_decay": 0.1}, torch.optim.SGD, {"lr": 2e-3, "weight_decay": 0.1}),
    ("momentum", {}, torch.optim.SGD, {"momentum": 0.9}),
    (
        "momentum",
        {"learning_rate": 5e-4, "momentum": 0.5, "weight_decay": 0.05},
        torch.optim.SGD,
        {"lr": 5e-4, "momentum": 0.5, "weight_decay": 0.05},
    ),
    ("nesterov_momentum", {}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (
        "nesterov_momentum",
        {"learning_rate": 5e-4, "momentum": 0.8, "weight_decay": 0.05},
        torch.optim.SGD,
        {"lr": 5e-4, "momentum": 0.8, "weight_decay": 0.05, "nesterov": True},
    ),
    ("adagrad", {}, torch.optim.Adagrad, {}),
    (
        "adagrad",
        {"learning_rate": 0.1, "eps": 1e-3, "weight_decay": 0.1},
        torch.optim.Adagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1},
    ),
    ("rmsprop", {}, torch.optim.RMSprop, {}),
    (
        "rmsprop",
        {"learning_rate": 3e-3, "alpha": 0.9, "eps": 1e-4, "weight_decay": 0.1},
        torch.optim.RMSprop,
        {"lr": 3e-3, "alpha": 0.9, "eps": 1e-4, "weight_decay": 0.1},
    ),
    ("adadelta", {}, torch.optim.Adadelta, {}),
    (
        "adadelta",
        {"learning_rate": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1},
        torch.optim.Adadelta,
        {"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1},
    ),
    ("adam", {}, torch.optim.Adam, {}),
    (
        "adam",
        {"learning_rate": 0.05, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1},
        torch.optim.Adam,
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1},
    ),
    ("adamax", {}, torch.optim.Adamax, {}),
    (
        "adamax",
        {"learning_rate": 0.05, "betas": (0.8, 0.7), "eps": 1e-4, "weight_decay": 0.1},
        torch.optim.Adamax,
        {"lr": 0.05, "betas": (0.8, 0.7), "eps": 1e-4, "weight_decay": 0.1},
    ),
    ("adamw", {}, torch.optim.AdamW, {}),
    (
        "adamw",
        {"learning_rate": 0.05, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2},
        torch.optim.AdamW,
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2},
    ),
]
Layer = namedtuple("Layer", ["weight", "bias"])


def start(dtype: str = "float64") -> Any:
    """Return parameters in every kind of nesting, a 0-d and an empty array among them."""
    random = np.random.default_rng(3)

    def array(*shape: int) -> np.ndarray:
        return np.asarray(random.uniform(-1, 1, shape), dtype)

    return {
        "layers": [Layer(array(3, 2), array(2)), (array(2, 2),)],
        "curve": array(5),
        "scale": array(),
        "no": array(0),
    }


def loss_of(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return an ill-conditioned quadratic of all elements plus Rosenbrock's function along them."""
    x = torch.cat([leaf.reshape(-1) for leaf in leaves])
    quadratic = (torch.logspace(-2, 1, len(x), dtype=x.dtype) * x**2).sum() / 2
    return quadratic + (3 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def grads_of(params: Any) -> Any:
    """Return the gradient of the loss as NumPy arrays."""
    leaves, spec = optree.tree_flatten(params)
    tensors = [torch.tensor(leaf, requires_grad=True) for leaf in leaves]
    return spec.unflatten([grad.numpy() for grad in torch.autograd.grad(loss_of(tensors), tensors)])


def torch_trajectory(make: Callable[[list[torch.Tensor]], Any], num_steps: int) -> list[list[np.ndarray]]:
    """Return the leaves after each step of a torch optimizer; ``make`` returns it, or it and a schedule."""
    tensors = [torch.tensor(leaf, requires_grad=True) for leaf in optree.tree_leaves(start())]
    optimizer, *schedules = make(tensors)
    trajectory = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(tensors).backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        trajectory.append([tensor.detach().numpy().copy() for tensor in tensors])
    return trajectory


def assert_follows(rule: updates.UpdateRule, expected: list[list[np.ndarray]]) -> None:
    """Assert that the rule goes the way of ``expected``, step by step."""
    params = start()
    state = rule.init(params)
    for leaves in expected:
        params, state = rule.step(params, grads_of(params), state)
        for ours, theirs in zip(optree.tree_leaves(params), leaves, strict=True):
            # The absolute part is for elements that cross zero; the others are of order 1.
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)


# ----- against torch.optim


@pytest.mark.parametrize(("name", "ours", "twin", "theirs"), TWINS, ids=[f"{t[0]}-{len(t[1])}" for t in TWINS])
@pytest.mark.sampled(3)
def test_trajectory_is_that_of_torch(
    name: str, ours: dict[str, Any], twin: Callable[..., Any], theirs: dict[str, Any]
) -> None:
    rule = getattr(updates, name)(**ours)
    assert_follows(rule, torch_trajectory(lambda tensors: (twin(tensors, **theirs),), num_steps=50))


@pytest.mark.parametrize("name", [make.__name__ for make in RULES])
def test_default_learning_rate_is_that_of_torch(name: str) -> None:
    twin = next(twin for rule, _, twin, _ in TWINS if rule == name)
    assert getattr(updates, name)().learning_rate == twin([torch.zeros(1)]).defaults["lr"]


def test_state_holds_the_values_of_torch() -> None:
    params, tensor = {"w": np.array([1.0, -2.0])}, torch.tensor([1.0, -2.0], dtype=torch.float64)
    rule, optimizer = updates.adam(0.1), torch.optim.Adam([tensor], lr=0.1)
    state = rule.init(params)
    for grad in ([0.5, -1.0], [2.0, 0.25]):
        params, state = rule.step(params, {"w": np.array(grad)}, state)
        tensor.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    for entry in rule.slots:
        np.testing.assert_allclose(state[entry]["w"], optimizer.state[tensor][entry].numpy(), rtol=1e-15)
    assert state["step"] == optimizer.state[tensor]["step"] == 2


def test_schedule_gets_the_number_of_steps_done() -> None:
    def with_schedule(tensors: list[torch.Tensor]) -> tuple[Any, Any]:
        optimizer = torch.optim.Adam(tensors, lr=1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.05 / (1 + step) ** 0.5)

    seen: list[int] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 0.05 / (1 + step) ** 0.5

    assert_follows(updates.adam(schedule), torch_trajectory(with_schedule, num_steps=20))
    assert seen == list(range(20))
    assert all(type(step) is int for step in seen)


def test_schedule_replaces_the_decay_of_adagrad() -> None:
    expected = torch_trajectory(lambda tensors: (torch.optim.Adagrad(tensors, lr=0.1, lr_decay=0.2),), num_steps=20)
    assert_follows(updates.adagrad(lambda step: 0.1 / (1 + step * 0.2)), expected)


# ----- promises of every rule


@pytest.mark.sampled(20)
@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_structure_shape_and_dtype_stay(make: Callable[..., updates.UpdateRule], dtype: str) -> None:
    # Values of NumPy's types are where a step would widen float32: they must be taken as plain numbers.
    rule = make(lambda step: np.float64(1e-3))
    params = start(dtype)
    state = rule.init(params)
    for _ in range(3):
        new, state = rule.step(params, optree.tree_map(lambda leaf: leaf * 0 + 1, params), state)
        state["step"] = np.asarray(state["step"])  # as a counter comes back from a device
        for tree in (new, *(state[slot] for slot in rule.slots)):
            assert optree.tree_structure(tree) == optree.tree_structure(params)
            assert [leaf.dtype for leaf in optree.tree_leaves(tree)] == [dtype] * 6
            assert [leaf.shape for leaf in optree.tree_leaves(tree)] == [p.shape for p in optree.tree_leaves(params)]
        params = new
    assert state["step"] == 3
    assert make(np.float64(1e-3)).step(params, params, state)[0]["curve"].dtype == dtype


@pytest.mark.parametrize("make", RULES)
def test_arguments_stay_as_they_are(make: Callable[..., updates.UpdateRule]) -> None:
    rule = make(weight_decay=0.1)
    arguments = start(), grads_of(start()), rule.step(start(), grads_of(start()), rule.init(start()))[1]
    before = copy.deepcopy(arguments)
    for leaf in optree.tree_leaves(arguments):
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
    rule.step(*arguments)
    first, second = (optree.tree_leaves(rule.step(*arguments)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    for leaf, old in zip(optree.tree_leaves(arguments), optree.tree_leaves(before), strict=True):
        np.testing.assert_array_equal(leaf, old)


class OperatorArray:
    """An array of a library that offers arithmetic and comparison, and nothing else."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = value
        self.shape, self.dtype = value.shape, value.dtype

    def __abs__(self) -> OperatorArray:
        return OperatorArray(abs(self._value))


def _operator(name: str) -> Callable[[OperatorArray, Any], OperatorArray]:
    def method(self: OperatorArray, other: Any) -> OperatorArray:
        assert isinstance(other, OperatorArray | float | int)
        value = other._value if isinstance(other, OperatorArray) else other
        return OperatorArray(np.asarray(getattr(self._value, name)(value)))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "ge", "gt"):
    setattr(OperatorArray, f"__{_name}__", _operator(f"__{_name}__"))


@pytest.mark.parametrize("make", RULES)
def test_rules_need_operators_only(make: Callable[..., updates.UpdateRule]) -> None:
    rule = make(weight_decay=0.1)
    params, grads = np.array([1.0, -2.0, 0.0]), np.array([0.5, 3.0, 0.0])
    ours, state = OperatorArray(params), rule.init(OperatorArray(params))
    expected, expected_state = params, rule.init(params)
    for _ in range(3):
        ours, state = rule.step(ours, OperatorArray(grads), state)
        expected, expected_state = rule.step(expected, grads, expected_state)
        np.testing.assert_array_equal(ours._value, expected)


@pytest.mark.parametrize("make", RULES)
def test_torch_tensors_stay_outside_of_autograd(make: Callable[..., updates.UpdateRule]) -> None:
    rule = make(weight_decay=0.1)
    values = start()
    params = optree.tree_map(lambda leaf: torch.tensor(leaf, requires_grad=True), values)
    state, expected_state = rule.init(params), rule.init(values)
    grads = optree.tree_map(torch.tensor, grads_of(values))
    for _ in range(3):
        params, state = rule.step(params, grads, state)
        values, expected_state = rule.step(values, optree.tree_map(torch.Tensor.numpy, grads), expected_state)
    for leaf in (*optree.tree_leaves(params), *optree.tree_leaves([state[slot] for slot in rule.slots])):
        assert isinstance(leaf, torch.Tensor)
        assert not leaf.requires_grad
    for leaf, expected in zip(optree.tree_leaves(params), optree.tree_leaves(values), strict=True):
        np.testing.assert_allclose(leaf.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("make", RULES)
def test_jax_arrays_and_tracing(make: Callable[..., updates.UpdateRule]) -> None:
    jax = pytest.importorskip("jax", reason="needs JAX: `make jax` installs it")
    rule = make(lambda step: 0.1 / (1 + step), weight_decay=0.1)
    values = {"w": np.array([1.0, -2.0], "float32"), "b": [np.array(0.5, "float32")]}
    params = optree.tree_map(jax.numpy.asarray, values)
    state, expected_state = rule.init(params), rule.init(values)
    traced_step = jax.jit(rule.step)
    for _ in range(2):
        traced = traced_step(params, params, state)
        params, state = rule.step(params, params, state)
        values, expected_state = rule.step(values, values, expected_state)
        for tree in (traced[0], params):
            for leaf, expected in zip(optree.tree_leaves(tree), optree.tree_leaves(values), strict=True):
                assert isinstance(leaf, jax.Array)
                assert leaf.dtype == "float32"
                np.testing.assert_allclose(leaf, expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("make", RULES)
def test_cupy_arrays(runtime: Callable[..., Any], make: Callable[..., updates.UpdateRule]) -> None:
    """In a worker, for CUDA keeps descriptors for the life of a process."""
    runtime(1, backend="cupy").function(lambda row: check_cupy_arrays(make), outputs=None)(np.ones(1))


def check_cupy_arrays(make: Callable[..., updates.UpdateRule]) -> None:
    import cupy

    rule = make(weight_decay=0.1)
    values = start("float32")
    params = optree.tree_map(cupy.asarray, values)
    state, expected_state = rule.init(params), rule.init(values)
    for _ in range(3):
        flats, unflatten = updates.flatten(params)
        grads, _ = updates.clip_by_global_norm(unflatten(flats), 0.5)
        expected_grads, _ = updates.clip_by_global_norm(values, 0.5)
        params, state = rule.step(params, grads, state)
        values, expected_state = rule.step(values, expected_grads, expected_state)
    for leaf, expected in zip(optree.tree_leaves(params), optree.tree_leaves(values), strict=True):
        assert isinstance(leaf, cupy.ndarray)
        assert leaf.dtype == "float32"
        np.testing.assert_allclose(leaf.get(), expected, rtol=1e-5)


@pytest.mark.parametrize("make", RULES)
def test_rules_and_states_can_be_pickled(make: Callable[..., updates.UpdateRule]) -> None:
    rule = make()
    sent = pickle.loads(cloudpickle.dumps(rule))
    state = pickle.loads(pickle.dumps(rule.init(start())))
    ours, theirs = rule.step(start(), grads_of(start()), state), sent.step(start(), grads_of(start()), state)
    for leaf, expected in zip(optree.tree_leaves(theirs), optree.tree_leaves(ours), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_half_precision_gradients_of_float32_parameters() -> None:
    rule = updates.adam()
    params, state = rule.step(torch.ones(2), torch.ones(2, dtype=torch.bfloat16), rule.init(torch.ones(2)))
    assert params.dtype == state["exp_avg"].dtype == torch.float32


def test_maximum_of_adamax_hands_nan_on() -> None:
    rule = updates.adamax()
    params, state = np.ones(2), rule.init(np.ones(2))
    params, state = rule.step(params, np.array([math.nan, 1.0]), state)
    params, state = rule.step(params, np.array([1.0, 1.0]), state)
    assert np.isnan(params).tolist() == np.isnan(state["exp_inf"]).tolist() == [True, False]


@pytest.mark.parametrize("make", RULES)
def test_repr_makes_the_rule_again(make: Callable[..., updates.UpdateRule]) -> None:
    rule = make(learning_rate=0.25)
    again = eval(repr(rule), vars(updates).copy())
    assert (again.name, again.learning_rate, again.settings) == (rule.name, 0.25, rule.settings)
    assert set(inspect.signature(make).parameters) == {"learning_rate", *rule.settings}


# ----- mistakes of the caller


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("sgd", {"learning_rate": -1}, ValueError, "cannot make sgd: got learning_rate=-1, expected a finite number"),
        ("sgd", {"learning_rate": math.nan}, ValueError, "got learning_rate=nan"),
        ("sgd", {"learning_rate": "fast"}, TypeError, "got learning_rate='fast'"),
        ("sgd", {"weight_decay": -0.1}, ValueError, "got weight_decay=-0.1"),
        ("momentum", {"momentum": 1.0}, ValueError, r"cannot make momentum: got momentum=1.0, expected .* \[0, 1\)"),
        ("nesterov_momentum", {"momentum": -0.5}, ValueError, "cannot make nesterov_momentum: got momentum=-0.5"),
        ("adagrad", {"eps": math.inf}, ValueError, "got eps=inf"),
        ("rmsprop", {"alpha": 1}, ValueError, "got alpha=1"),
        ("adadelta", {"rho": 2}, ValueError, "got rho=2"),
        ("adam", {"betas": 0.9}, ValueError, "got betas=0.9, expected two numbers"),
        ("adam", {"betas": (0.9, 1.0)}, ValueError, r"got betas\[1\]=1.0"),
        ("adamax", {"betas": (True, 0.9)}, TypeError, r"got betas\[0\]=True"),
        ("adamw", {"eps": None}, TypeError, "got eps=None"),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(updates, name)(**settings)


@pytest.mark.parametrize("value", [np.arange(3), np.ones(2, complex), 1.0, "w", np.ones(2, bool)])
def test_init_refuses_what_has_no_gradient(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot initialise adam: got params\['w'\]\[0\] of .* floating-point"):
        updates.adam().init({"w": [value]})


def test_step_refuses_what_does_not_fit() -> None:
    rule = updates.adam()
    params = {"w": np.ones((2, 3), "float32"), "b": np.ones(3, "float32")}
    state = rule.init(params)
    with pytest.raises(ValueError, match=r"got grads of structure .*expected that of the parameters"):
        rule.step(params, {"w": params["w"]}, state)
    with pytest.raises(ValueError, match=r"got grads\['b'\] of shape \(3, 1\), expected the parameter's, \(3,\)"):
        rule.step(params, {**params, "b": np.ones((3, 1))}, state)
    with pytest.raises(TypeError, match=r"got grads\['w'\] of dtype float64 for a parameter of dtype float32"):
        rule.step(params, {**params, "w": np.ones((2, 3))}, state)
    with pytest.raises(ValueError, match=r"got a state with entries \['momentum_buffer', 'step'\]"):
        rule.step(params, params, updates.momentum().init(params))
    with pytest.raises(ValueError, match=r"got state\['exp_avg'\]\['b'\] of shape \(2,\)"):
        rule.step(params, params, {**state, "exp_avg": {**params, "b": np.ones(2)}})


@pytest.mark.parametrize("rate", [math.nan, -1.0, math.inf])
def test_schedule_is_checked(rate: float) -> None:
    with pytest.raises(ValueError, match=f"got a learning rate of {rate} from the schedule at step 0"):
        updates.sgd(lambda step: rate).step(np.ones(1), np.ones(1), {"step": 0})


# ----- clipping


FINITE = st.one_of(
    st.floats(-1e6, 1e6, allow_subnormal=False).filter(lambda value: value == 0 or abs(value) > 1e-9),
    st.sampled_from([0.0, 1.0, -3.0]),
)
GRADIENTS = st.lists(
    hypothesis_numpy.arrays(
        "float64", hypothesis_numpy.array_shapes(min_dims=0, min_side=0, max_side=4), elements=FINITE
    ),
    min_size=1,
    max_size=4,
)


@hypothesis.given(GRADIENTS, st.floats(1e-3, 1e3))
@examples(25)
def test_clip_is_that_of_torch(grads: list[np.ndarray], max_norm: float) -> None:
    tensors = [torch.zeros(grad.shape, dtype=torch.float64) for grad in grads]
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = torch.tensor(grad)
    expected_norm = torch.nn.utils.clip_grad_norm_(tensors, max_norm)
    clipped, norm = updates.clip_by_global_norm(grads, max_norm)
    np.testing.assert_allclose(norm, expected_norm.numpy(), rtol=1e-13)
    for ours, tensor in zip(clipped, tensors, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(ours, tensor.grad.numpy(), rtol=1e-13, atol=0)
    if expected_norm + 1e-6 < max_norm:
        assert all(np.array_equal(ours, grad) for ours, grad in zip(clipped, grads, strict=True))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clip_of_infinite_gradients_is_that_of_torch(value: float) -> None:
    tensor = torch.zeros(3)
    tensor.grad = torch.tensor([1.0, value, 0.0])
    with np.errstate(invalid="ignore"):
        (ours,), norm = updates.clip_by_global_norm((tensor.grad.numpy().copy(),), 1.0)
    expected_norm = torch.nn.utils.clip_grad_norm_([tensor], 1.0)
    np.testing.assert_array_equal(ours, tensor.grad.numpy())
    np.testing.assert_array_equal(norm, expected_norm.numpy())


@pytest.mark.parametrize("array", [np.asarray, lambda value: torch.tensor(np.asarray(value))], ids=["numpy", "torch"])
def test_clip_keeps_each_dtype_and_measures_half_precision_in_float32(array: Callable[[Any], Any]) -> None:
    grads = {
        "half": array(np.full(4, 3e4, "float16")),
        "single": array(np.ones(2, "float32")),
        "empty": array(np.ones(0)),
    }
    clipped, norm = updates.clip_by_global_norm(grads, 1.0)
    assert {key: value.dtype for key, value in clipped.items()} == {key: value.dtype for key, value in grads.items()}
    np.testing.assert_allclose(float(norm), math.sqrt(4 * float(np.float16(3e4)) ** 2 + 2), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(clipped["half"], "float64"), 0.5, rtol=1e-3)
    np.testing.assert_array_equal(np.asarray(grads["half"]), np.full(4, 3e4, "float16"))


def test_clip_at_infinity_only_measures() -> None:
    grads = [np.array([3.0]), np.array([4.0])]
    clipped, norm = updates.clip_by_global_norm(grads, math.inf)
    assert (clipped, float(norm)) == (grads, 5.0)
    assert updates.clip_by_global_norm({}, 1.0) == ({}, 0)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan, None, "1", True])
def test_clip_checks_the_norm(max_norm: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot clip gradients: got a maximal norm of .* above 0"):
        updates.clip_by_global_norm([np.ones(2)], max_norm)


# ----- flat buffers


TREES = st.recursive(
    hypothesis_numpy.arrays(
        st.sampled_from(["float32", "float64", "int32"]),
        hypothesis_numpy.array_shapes(min_dims=0, min_side=0, max_side=3),
        elements=st.integers(-9, 9),
    ),
    lambda trees: (
        st.lists(trees, max_size=3) | st.dictionaries(st.sampled_from("abc"), trees) | st.tuples(trees, trees)
    ),
    max_leaves=6,
)


@hypothesis.given(TREES, st.sampled_from([np.asarray, torch.tensor]))
@examples(25)
def test_flatten_round_trip(values: Any, array: Callable[[Any], Any]) -> None:
    tree = optree.tree_map(array, values)
    flats, unflatten = updates.flatten(tree)
    assert [flat.ndim for flat in flats] == [1] * len({leaf.dtype for leaf in optree.tree_leaves(values)})
    assert sum(len(flat) for flat in flats) == sum(leaf.size for leaf in optree.tree_leaves(values))
    again = unflatten([flat * 2 for flat in flats])
    assert optree.tree_structure(again) == optree.tree_structure(tree)
    for leaf, old in zip(optree.tree_leaves(again), optree.tree_leaves(tree), strict=True):
        assert (type(leaf), leaf.dtype, leaf.shape) == (type(old), old.dtype, old.shape)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(old) * 2)


def test_flatten_copies_and_unflatten_views() -> None:
    tree = [np.ones((2, 3)).T, np.zeros(2)]
    (flat,), unflatten = updates.flatten(tree)
    assert not any(np.shares_memory(flat, leaf) for leaf in tree)
    assert all(np.shares_memory(flat, leaf) for leaf in unflatten((flat,)))


def test_flatten_joins_jax_arrays() -> None:
    jax = pytest.importorskip("jax", reason="needs JAX: `make jax` installs it")
    (flat,), unflatten = updates.flatten([jax.numpy.ones((2, 2)), jax.numpy.zeros(1)])
    assert isinstance(flat, jax.Array)
    assert [leaf.shape for leaf in unflatten((flat,))] == [(2, 2), (1,)]
    clipped, norm = jax.jit(lambda grads: updates.clip_by_global_norm(grads, 1.0))([flat])
    np.testing.assert_allclose(clipped[0], np.array([1, 1, 1, 1, 0]) / 2, rtol=1e-5)
    assert float(norm) == 2


def test_flatten_and_unflatten_refuse_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"cannot flatten tree\['b'\]: got type float, expected an array"):
        updates.flatten({"w": np.ones(1), "b": 1.0})
    flats, unflatten = updates.flatten([np.ones(3), np.ones(2, "float32")])
    for wrong in ([np.ones(4), flats[1]], [flats[0]], [np.ones((3, 1)), flats[1]], [flats[1], flats[0]]):
        with pytest.raises(ValueError, match=r"cannot unflatten buffers: got shapes .* expected \[\(3,\), \(2,\)\]"):
            unflatten(wrong)
