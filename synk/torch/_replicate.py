"""``replicate``: a model, its optimizer and whatever goes with them on every rank, trained as one on whole batches.

In one file because a replica and its steps are one thing: each of them asks the other before a call and after it.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from synk._api.current import current
from synk._api.function import Function
from synk._api.runtime import Runtime
from synk._master.code.handles import Handle
from synk._pure.interrupts import as_operation
from synk._pure.output_ops import DEFAULT_OP, DefaultOp
from synk._pure.tensors import num_torch_threads
from synk._wire.control import Traits
from synk.errors import ReentrancyError
from synk.torch import _rank, _state, _state_bytes
from synk.torch._body import body_of, on_rank
from synk.torch._links import link, unlink
from synk.torch._reduction import Options
from synk.torch._threads import BusyThreads


def replicate(
    *objects: Any,
    seed: int = 0,
    sync_batchnorm: bool = False,
    bucket_mb: float = 25.0,
    overlap: bool | str = "auto",
    runtime: Runtime | None = None,
) -> Replicated:
    """Give every rank a copy of a model, its optimizer and whatever belongs to them, and keep all copies alike.

    Parameters
    ----------
    *objects : module, optimizer, scheduler, GradScaler, or anything that has a ``state_dict`` or can be pickled
        They may refer to one another: all travel in one pickle. An optimizer's parameters must be those of a module
        that is given.
    seed : int
        torch's generators are seeded before each call from this, the number of the step and the rank.
    sync_batchnorm : bool
        Batch norms normalise over the rows of all ranks while they train, and not over each rank's own.
    bucket_mb : float
        Gradients are reduced in buffers of at most this size, in megabytes.
    overlap : {"auto", True, False}
        Whether a buffer is reduced as soon as its gradients are there, while the backward pass goes on, or all of them
        at its end. By default on GPUs, but with ``sync_batchnorm``; a CPU worker would do the one thing after the
        other.
    runtime : Runtime, optional
        The current one where not given.

    Returns
    -------
    Replicated

    Raises
    ------
    ValueError
        If an optimizer has a parameter that belongs to no given module, or an option is none of those above.
    SerializationError
        If the objects cannot be pickled.

    Warns
    -----
    UserWarning
        Once, if other threads of the program are busy while it waits for CPU workers: those of torch take cores from
        them (``torch.set_num_threads(1)``).

    Examples
    --------
    >>> import torch, synk, synk.torch
    >>> _ = torch.set_num_threads(1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    >>> with synk.fork(2):
    ...     rep = synk.torch.replicate(model, optimizer)
    ...     @rep.function
    ...     def step(model, optimizer, x, y):
    ...         optimizer.zero_grad()
    ...         loss = ((model(x) - y) ** 2).mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         return loss
    ...     x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    ...     losses = [float(step(x, x.sum(1, keepdim=True))) for _ in range(50)]
    ...     losses[-1] < losses[0], rep.num_steps
    (True, 50)
    """
    if not objects:
        raise TypeError("cannot replicate: got no objects, expected a module, and what belongs to it.")
    _check_optimizers(objects)
    for obj in objects:
        if _state.is_module(obj) and any(
            isinstance(each, torch.nn.parameter.UninitializedParameter) for each in obj.parameters()
        ):
            raise ValueError(
                f"cannot replicate {type(obj).__name__}: it has lazy parameters without a shape, expected a model that "
                "has run once. Call it with a batch first."
            )
    if not bucket_mb > 0:
        raise ValueError(f"cannot replicate: got bucket_mb={bucket_mb!r}, expected a positive number.")
    if not (isinstance(overlap, bool) or overlap == "auto"):
        raise ValueError(f"cannot replicate: got overlap={overlap!r}, expected 'auto', True or False.")
    options = Options(int(seed), bool(sync_batchnorm), int(bucket_mb * 1e6), overlap)
    return Replicated(objects, options, current() if runtime is None else runtime)


def _check_optimizers(objects: Sequence[Any]) -> None:
    known = {id(p) for obj in objects if _state.is_module(obj) for p in obj.parameters()}
    for obj in objects:
        if not _state.is_optimizer(obj):
            continue
        for number, group in enumerate(obj.param_groups):
            foreign = sum(id(parameter) not in known for parameter in group["params"])
            if foreign:
                raise ValueError(
                    f"cannot replicate {type(obj).__name__}: {foreign} of the {len(group['params'])} parameters of its "
                    f"group {number} belong to no module that was given, so a step would change copies that no model "
                    "uses. Pass the modules that they belong to as well."
                )


class Replicated(Handle):
    """Objects of which every rank has its own copy, all alike; made by :func:`synk.torch.replicate`.

    The master's own objects stay what they were. Looking at one brings it up to date first; what the program changes
    between two calls (a learning rate, ``model.eval()``, ``load_state_dict``, a scheduler's step) reaches the ranks
    before the next call. Tensors that were taken from the objects earlier are up to date only after :meth:`pull`.

    Attributes
    ----------
    num_steps : int
        Calls so far that were steps of training.
    """

    __slots__ = (
        "__weakref__", "_fingerprints", "_glances", "_is_behind", "_is_busy", "_is_touched", "_left_out", "_linked",
        "_lock", "_objects", "_options", "_resident", "_runtime", "_threads",
    )  # fmt: skip

    def __init__(self, objects: Sequence[Any], options: Options, runtime: Runtime) -> None:
        self._objects = tuple(objects)
        self._options = options
        self._runtime = runtime
        self._lock = threading.RLock()
        has_cpu_workers = runtime.backend == "numpy" and not runtime._session.workers.is_inline
        self._threads = BusyThreads(num_torch_threads() if has_cpu_workers else 1)
        self._is_behind = self._is_busy = self._is_touched = False
        self._left_out: set[str] = set()  # attributes of which the user was told
        name = ", ".join(type(obj).__name__ for obj in objects)
        self._resident = runtime.resident(
            _rank.RankReplica(objects, options), name=name, dump=_rank.dump, load=_rank.load
        )
        self._referent = None
        self._reference = (on_rank, (self._resident._reference[1][0],))
        self._note_seen([_state.fingerprint(obj) for obj in objects])
        self._linked = [obj for obj in objects if link(obj, self._refresh)]
        runtime._session.at_close.append(functools.partial(_leave, weakref.ref(self)))

    # -- functions ----------------------------------------------------------------------------------------------------

    def function(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        outputs: Any = DEFAULT_OP,
        bcast_inputs: str | Sequence[str] = (),
        trains: bool = True,
        name: str | None = None,
    ) -> Any:
        """Build a :class:`synk.Function` whose first parameters are the replicated objects; also a decorator.

        Parameters
        ----------
        fn : callable
            The body of the training loop: gets each rank's own objects, then that rank's rows as tensors. When
            ``loss.backward()`` returns in it, the gradients are those of all rows.
        outputs, bcast_inputs, name
            As for :func:`synk.function`.
        trains : bool
            Whether a call is a step of training. False, for evaluation: it runs under ``torch.no_grad()`` and must
            change no object.

        Returns
        -------
        StepFunction
        """
        if fn is None:
            return functools.partial(
                self.function, outputs=outputs, bcast_inputs=bcast_inputs, trains=trains, name=name
            )
        if not callable(fn):
            raise TypeError(f"cannot build a function: got {type(fn).__name__}, expected a callable.")
        bodies = [body_of(fn, self._resident, self._objects, trains, draws=draws) for draws in (True, False)]
        name = name or bodies[0].__name__
        return StepFunction(self, bodies, outputs=outputs, bcast_inputs=bcast_inputs, trains=trains, name=name)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside the body: a context whose backward passes leave each rank's gradients its own.

        The next backward pass outside of it, in this call or in a later one, reduces what has gathered.
        """
        raise ReentrancyError(
            "cannot keep gradients back in the master: no_sync() has a meaning inside the function, around backward()."
        )

    # -- the master's objects -----------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return int(self._state("count steps")["num_steps"])

    def pull(self) -> None:
        """Bring the master's objects up to date; looking at one of them does it by itself.

        Raises
        ------
        ValueError
            If they were changed here meanwhile, by way of tensors taken from them before.
        """
        with self._lock, self._busy():
            if self._is_behind:  # otherwise what the program has is newer
                self._check_unchanged()
                left_out = set(_state_bytes.load_all(self._objects, self._state("pull")["objects"])) - self._left_out
                self._note_equal()
                if left_out:
                    self._left_out |= left_out
                    warnings.warn(
                        f"{', '.join(sorted(left_out))} stays each worker's own, because it cannot be pickled: it does "
                        "not come back, and a worker that takes the place of another one begins without it.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            self._is_touched = (
                True  # whoever looks may write into a tensor, which need not leave a trace but its values
            )

    def _state(self, verb: str) -> dict[str, Any]:
        """Return the state that the ranks have."""
        session, resident = self._runtime._session, self._resident._referent
        with session.entered(verb):
            session.begin(verb)
            resident.check(verb)
            state: dict[str, Any] = session.residents.state_of(resident, 0, session.deadline(None))
        return state

    def push(self) -> None:
        """Bring all ranks into the state of the master's objects."""
        with self._lock, self._busy():
            self._resident.set(_rank.RankReplica(self._objects, self._options))
            self._note_equal()

    def _note_equal(self) -> None:
        self._note_seen([_state.fingerprint(obj) for obj in self._objects])
        self._is_behind = self._is_touched = False

    def _note_seen(self, fingerprints: list[dict[str, Any]]) -> None:
        self._fingerprints = fingerprints
        self._glances = [_state.Glance.of(obj) for obj in self._objects]

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    def _refresh(self) -> None:
        self._is_touched = self._is_touched or not self._is_busy
        if self._is_behind and not self._is_busy:
            with self._lock:
                if self._is_behind and not self._is_busy:
                    self.pull()

    def _check_unchanged(self) -> None:
        for obj, before in zip(self._objects, self._fingerprints):
            if self._is_behind and _state.fingerprint(obj, before) != before:
                raise ValueError(
                    f"cannot bring {type(obj).__name__} up to date: it was changed in the master, by way of tensors "
                    "that were taken from it before, while the ranks took steps. Call pull() before you change what "
                    "you have kept."
                )

    def _before_call(self, *, trains: bool) -> None:
        """Have the ranks see what the program has changed, and note that a step is about to make them differ."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "cannot call a replicated function inside of torch.autocast: the workers would not compute in its "
                "dtype, expected it in the function's body. Move the with statement there."
            )
        with self._lock, self._busy():
            now = [self._seen(index, obj) for index, obj in enumerate(self._objects)]
            self._is_touched = False
            if now != self._fingerprints:
                if self._is_behind:
                    self._check_unchanged()
                self._push_changes(now)
            self._is_behind = self._is_behind or trains
            for obj in self._objects if trains else ():
                if _state.is_optimizer(obj):
                    obj.__dict__["_opt_called"] = True  # what a scheduler that steps in the master looks at

    def _seen(self, index: int, obj: Any) -> dict[str, Any]:
        """Return the fingerprint of an object as it is now, which a glance spares most calls."""
        before, glance = self._fingerprints[index], self._glances[index]
        if glance is not None and not self._is_touched and glance.is_same():
            return before
        now = _state.fingerprint(obj, None if self._is_touched else before)
        if now == before:
            self._glances[index] = _state.Glance.of(obj)
        return now

    def _push_changes(self, now: list[dict[str, Any]]) -> None:
        was = self._fingerprints
        if any(one.get("shape") != other.get("shape") for one, other in zip(now, was)):
            _check_optimizers(self._objects)
            self.push()
            return
        changed = {
            index: part
            for index, obj in enumerate(self._objects)
            if (part := _state.changes(obj, was[index], now[index]))
        }
        session, resident = self._runtime._session, self._resident._referent
        with session.entered("push"):
            session.begin("push")
            resident.check("push")
            state = pickle.dumps({"objects": _state_bytes.as_bytes(self._objects, changed)}, protocol=5)
            session.residents.restore(resident, state, next(session.numbers), session.deadline(None))
        self._note_seen(now)

    @as_operation
    def _leave(self) -> None:
        """The runtime is about to be closed: the objects are ordinary ones then, with what they have learned."""
        try:
            if self._is_behind:
                self.pull()
        except Exception as error:
            warnings.warn(
                f"{', '.join(type(obj).__name__ for obj in self._objects)} could not be brought up to date before the "
                f"runtime was closed, and holds what it held at the last pull: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
        for obj in self._linked:
            unlink(obj)

    def __repr__(self) -> str:
        return f"<synk.torch.Replicated {', '.join(type(obj).__name__ for obj in self._objects)}>"


def _leave(replicated: weakref.ref[Replicated]) -> None:
    """End what the program still has; the runtime keeps nothing alive that is dropped before."""
    alive = replicated()
    if alive is not None:
        alive._leave()


class StepFunction(Function[...]):
    """A :class:`synk.Function` over replicated objects; made by :meth:`Replicated.function`."""

    _known = Traits.COMMUNICATES | Traits.CHANGES  # gradients are reduced, and the rank's own objects learn

    def __init__(self, replicated: Replicated, bodies: Sequence[Any], *, trains: bool, **options: Any) -> None:
        self._replicated = replicated
        self._trains = trains
        changes = [replicated._resident] if trains else []
        self._options = {"framework": "torch", "changes": changes, "session": replicated._runtime._session, **options}
        body, self._quiet_body = bodies
        super().__init__(body, **self._options)
        self._callee.is_unchecked = isinstance(options["outputs"], DefaultOp)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self._replicated._before_call(trains=self._trains)
        threads = self._replicated._threads
        if not threads.is_watching:
            return super().__call__(*args, **kwargs)
        with threads:
            return super().__call__(*args, **kwargs)

    def serial(self, /, *args: Any, **kwargs: Any) -> Any:
        """Take the step on one worker, with all rows; the others take over what it has learned."""
        self._replicated._before_call(trains=self._trains)
        return super().serial(*args, **kwargs)

    def submit(self, /, *args: Any, **kwargs: Any) -> Any:
        """Send the step and return without waiting for it; see :meth:`synk.Function.submit`."""
        self._replicated._before_call(trains=self._trains)
        return super().submit(*args, **kwargs)

    def verify(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compare the step with the serial one; nothing of it is kept.

        Where it draws random numbers, as dropout does, both run with all modules but batch norms in ``eval()``.
        """
        self._replicated._before_call(trains=False)
        return super().verify(*args, **kwargs)

    def _without_draws(self) -> Function[...]:
        return Function(self._quiet_body, **self._options)
