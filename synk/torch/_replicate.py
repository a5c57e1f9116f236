"""``replicate``: a model, its optimizer and the objects that belong to them on every rank, trained as one on whole
batches.

This is the program's half: ordinary calls of functions over one resident object. A call of a step is in ``_steps.py``,
a rank's half in ``_rank.py``. In one file because every verb begins with whose objects are newer.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn

import torch

from synk._api.current import current
from synk._api.runtime import Runtime
from synk._code.captured import captured_in
from synk._processes.output import warn_at_users_line
from synk._pure import files
from synk._pure.generators import generator_states
from synk._pure.output_ops import DEFAULT_OP
from synk._pure.tracebacks import verb
from synk._wire.parcels import dumps
from synk.torch import _checkpoint, _rank, _state
from synk.torch._guard import Guard
from synk.torch._module_parts import check_gradients, check_memory, makings_of
from synk.torch._reduction import Options
from synk.torch._steps import StepFunction


@verb
def replicate(
    *objects: Any,
    seed: int = 0,
    sync_batchnorm: bool = False,
    bucket_mb: float = 25.0,
    overlap: bool | str = "auto",
    runtime: Runtime | None = None,
) -> Replicated:
    """Move a model, its optimizer and everything that belongs to them to the ranks, and keep the copies there alike.

    The program's own objects stay as they are until :meth:`Replicated.pull`, and what the program does to them reaches
    the ranks by :meth:`Replicated.push`; ``with rep.here():`` is both.

    Parameters
    ----------
    *objects : module, optimizer, scheduler, GradScaler, or anything with ``state_dict`` and ``load_state_dict``
        Objects that may refer to one another: all travel in one pickle. An optimizer's parameters must belong to one of
        the given modules.
    seed : int
        Before each call torch's generators are seeded from this number, the number of the step and the rank.
    sync_batchnorm : bool
        Whether batch norms in training mode normalise over the rows of all ranks instead of each rank's own.
    bucket_mb : float
        Gradients are reduced in buffers of at most this size, in megabytes.
    overlap : {"auto", True, False}
        Whether each buffer is reduced as soon as its gradients are there, while the backward pass goes on. Otherwise
        all buffers are reduced at the end of the pass. By default they overlap only on GPUs and without
        ``sync_batchnorm``, since a CPU worker would do one thing after the other.
    runtime : Runtime, optional
        By default the current one.

    Returns
    -------
    Replicated

    Raises
    ------
    TypeError
        If there are no objects, or one has no ``state_dict``.
    ValueError
        If an optimizer has a parameter that belongs to no given module, a module has lazy parameters without a shape,
        a parameter has a hook, a tensor that is no parameter requires a gradient, parameters or buffers that are
        different tensors share memory, or an option has a value that is not listed.
    SerializationError
        If the objects cannot be pickled.

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
        raise TypeError("cannot replicate: got no objects, expected a module and the objects that belong to it.")
    _check_objects(objects)
    if not bucket_mb > 0:
        raise ValueError(f"cannot replicate: got bucket_mb={bucket_mb!r}, expected a positive number.")
    if not (isinstance(overlap, bool) or overlap == "auto"):
        raise ValueError(f"cannot replicate: got overlap={overlap!r}, expected 'auto', True or False.")
    runtime = current() if runtime is None else runtime
    options = Options(int(seed), bool(sync_batchnorm), int(bucket_mb * 1e6), overlap)
    return Replicated(objects, options, runtime)


def _check_objects(objects: Sequence[Any]) -> None:
    for obj in objects:
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise TypeError(
                f"cannot replicate a {type(obj).__name__}: it has no state_dict and load_state_dict, expected modules, "
                "optimizers and others with these methods. Give it both, or make it an attribute of a module."
            )
        for name, each in obj.named_parameters() if _state.is_module(obj) else ():
            if isinstance(each, torch.nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"cannot replicate {type(obj).__name__}: it has lazy parameters without a shape, expected a model "
                    "that has run once. Call it with a batch first."
                )
            if each._backward_hooks or each._post_accumulate_grad_hooks:
                raise ValueError(
                    f"cannot replicate {type(obj).__name__}: its parameter {name!r} has a hook, expected none, because "
                    "a pickle leaves it out and it would see the gradient of a worker's rows only. Remove it, and "
                    "change the gradient in the body, after backward()."
                )
    modules = [obj for obj in objects if _state.is_module(obj)]
    check_gradients(f"replicate {_state.names_of(modules)}", _state.parts_of(modules))
    check_memory(f"replicate {_state.names_of(modules)}", (pair for obj in modules for pair in _state.tensors_of(obj)))
    known = {id(parameter) for parameter in _state.parameters_of(objects)}
    for obj in filter(_state.is_optimizer, objects):
        for number, group in enumerate(obj.param_groups):
            foreign = sum(id(parameter) not in known for parameter in group["params"])
            if foreign:
                raise ValueError(
                    f"cannot replicate {type(obj).__name__}: {foreign} of the {len(group['params'])} parameters of its "
                    f"group {number} belong to no module that was given, so a step would change copies that no model "
                    "uses. Pass the modules that they belong to as well."
                )


class Replicated:
    """Objects with a copy on every rank, all alike. Made by :func:`synk.torch.replicate`.

    The program's own objects stay as they are until :meth:`pull`. A program that uses them while they are behind, or
    changes them and does not :meth:`push`, gets an error that names the cure.

    Attributes
    ----------
    num_steps : int
        How many calls so far were training steps.
    """

    __slots__ = (
        "__weakref__", "_calls", "_guard", "_lock", "_made_of", "_num_here", "_num_steps", "_objects", "_options",
        "_resident", "_runtime",
    )  # fmt: skip

    def __init__(self, objects: Sequence[Any], options: Options, runtime: Runtime) -> None:
        self._objects = tuple(objects)
        self._options, self._runtime = options, runtime
        self._lock = threading.RLock()
        self._calls: dict[str, Any] = {}
        self._num_steps: int | None = 0  # None: a step has failed, and the ranks know whether it counted
        self._num_here = 0  # the steps that the program's objects have seen
        self._resident = runtime.resident(
            _rank.RankReplica(objects, options), name=_state.names_of(self._objects), dump=_rank.dump, load=_rank.load
        )
        self._guard = Guard(self._objects)
        self._note_alike(0)
        runtime._session.guests[self] = None

    # -- functions ----------------------------------------------------------------------------------------------------

    @verb
    def function(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        outputs: Any = DEFAULT_OP,
        bcast_inputs: str | Sequence[str] = (),
        trains: bool = True,
    ) -> Any:
        """Build a :class:`synk.Function` whose first parameters are the replicated objects. Also a decorator.

        Parameters
        ----------
        fn : callable
            The body of the training loop. It gets the rank's own objects, then the rank's rows as tensors. When
            ``loss.backward()`` returns in it, the gradients are those of all rows.
        outputs, bcast_inputs
            As for :func:`synk.function`.
        trains : bool
            Whether a call is a training step. False is for evaluation: the body then runs under ``torch.no_grad()``,
            flags and buffers are put back, and a write into a parameter is an error.

        Returns
        -------
        StepFunction

        Raises
        ------
        TypeError
            If ``fn`` is not callable, or has fewer parameters than there are objects.
        ValueError
            If an option has a value that is not listed, or ``fn`` captures a parameter or buffer of these objects.
        """
        if fn is None:
            return functools.partial(self.function, outputs=outputs, bcast_inputs=bcast_inputs, trains=trains)
        return StepFunction(self, fn, outputs=outputs, bcast_inputs=bcast_inputs, trains=trains)

    # -- the program's objects ----------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        if self._num_steps is None:
            self._num_steps = max(each for each in self._on_ranks("tell_steps") if each is not None)
        return self._num_steps

    @verb
    def pull(self) -> None:
        """Bring the program's objects into the state of those of rank 0, if these are newer.

        Parameters, buffers, gradients, optimizers, flags, and numbers and texts among the modules' attributes come. All
        other attributes are each worker's own.

        Warns
        -----
        RuntimeWarning
            If the program had changed the objects while they were behind. The change is gone.
        """
        with self._lock:
            if self._guard.is_behind:
                changed = self._guard.difference()
                state = self._on_ranks("told")[0]
                _state.load(self._objects, state["objects"])
                self._note_alike(state["num_steps"])
                if changed:
                    warn_at_users_line(
                        f"pull() has undone what the program had changed while the workers' copies were newer: "
                        f"{changed}. Change it again, inside of `with rep.here():`.",
                        RuntimeWarning,
                    )

    @verb
    def push(self) -> None:
        """Send the program's objects to all ranks.

        Attributes that :meth:`pull` leaves to the workers stay as they are there, unless the program has changed one,
        or what the objects are made of. Then all of them begin again as the program has them.

        Raises
        ------
        ValueError
            If the ranks' objects are newer, so that their steps would be lost. Or as for ``replicate``.
        """
        with self._lock:
            is_lost = bool(self._resident._referent.lost)
            if self._guard.is_behind and not is_lost:
                raise ValueError(
                    f"cannot push: the steps of the workers would be lost, since {self!r}. Call rep.pull() before you "
                    "change the program's objects; `with rep.here():` does both. rep.load(path) goes back to a file."
                )
            _check_objects(self._objects)
            num_steps = self._num_here if is_lost else self.num_steps
            if is_lost or self._makings() != self._made_of:
                self._replace(num_steps)
                return
            state = {"num_steps": num_steps, "seed": self._options.seed, "objects": _state.dump(self._objects)}
            self._on_ranks("take", dumps(state))
            self._note_alike(num_steps)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Return a context in which the program uses and changes its objects: :meth:`pull`, then :meth:`push`.

        After an exception in it nothing is sent.
        """
        self.pull()
        yield
        self.push()

    def _replace(self, num_steps: int) -> None:
        """Give every rank new objects, made from the program's."""
        with self._guard.lifted():
            self._resident.set(_rank.RankReplica(self._objects, self._options, num_steps))
        self._note_alike(num_steps)

    def _note_alike(self, num_steps: int) -> None:
        self._num_steps = self._num_here = num_steps
        self._guard.note_alike()
        self._made_of = self._makings()

    def _makings(self) -> bytes:
        """Return what the objects are made of: all that ``take`` does not take."""
        parameters = _state.parameters_of(self._objects)
        others = [obj for obj in self._objects if not _state.is_optimizer(obj)]
        optimizers = [
            (_rank.left_out_of(obj), [group["params"] for group in obj.param_groups])
            for obj in filter(_state.is_optimizer, self._objects)
        ]
        shapes = [(parameter.dtype, tuple(parameter.shape)) for parameter in parameters]
        made_of = others, optimizers, shapes
        tensors = [pair[1] for obj in filter(_state.is_module, self._objects) for pair in _state.tensors_of(obj)]
        return makings_of(f"module {_state.names_of(self._objects)!r}", made_of, tensors)

    def _on_ranks(self, method: str, *given: Any) -> list[Any]:
        """Call a method of each rank's ``RankReplica``, and return what the ranks return."""
        if method not in self._calls:
            resident = self._resident

            def run(given: Any) -> Any:
                return getattr(resident.value, method)(*given)

            run.__name__ = method
            updates = [resident] if method.startswith("take") else ()
            self._calls[method] = self._runtime.function(
                run, bcast_inputs="given", outputs=None, per_rank=True, updates=updates
            )
        found: list[Any] = self._calls[method](given)
        return found

    # -- steps --------------------------------------------------------------------------------------------------------

    def _before_call(self, *, trains: bool) -> None:
        """Refuse a call that would not do what the program means. Note that a step puts its objects behind."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "cannot call a replicated function inside of torch.autocast: the workers would not compute in its "
                "dtype, expected it in the function's body. Move the with statement there."
            )
        for other in [*self._runtime._session.guests]:
            if other is not self and other._guard.is_behind and other._guard.shares_with(self._guard):
                raise ValueError(
                    f"cannot call a replicated function: of {_state.names_of(self._objects)} the workers have a newer "
                    f"copy of another replicate({_state.names_of(other._objects)}), expected each object in one "
                    "replicate(). Pass all objects to one, and take the functions for training and for evaluation from "
                    "it; or call pull() on the other one, and push() on this one."
                )
        if changed := self._guard.difference():
            cure = (
                "Call rep.pull(), which undoes the change, make it again, and call rep.push(); or `with rep.here():`."
                if self._guard.is_behind
                else "Call rep.push() after what the program changes, or make it inside of `with rep.here():`."
            )
            raise ValueError(
                f"cannot call a replicated function: the program has changed {changed}, which the workers do not have, "
                f"expected its objects as they were when they were sent. {cure}"
            )
        if trains and not self._guard.is_behind:
            self._guard.set_behind(True)

    def _check_sent(self, function: Any, residents: Set[Any], tensors: Sequence[Any]) -> None:
        """Refuse a function with a tensor of the program's objects, which are not those that the workers train.

        Those of a module that it captured are out of date only while the hooks of the guard refuse them.

        Raises
        ------
        ValueError
            If it runs over these objects, or while they are behind.
        """
        is_body = self._resident._referent in residents
        modules = filter(_state.is_module, self._objects)
        names = {_state.address(each): (name, obj) for obj in modules for name, each in _state.tensors_of(obj)}
        places = set(map(_state.address, tensors)) & names.keys() - {0}
        if places and (is_body or self._guard.is_behind):
            captured = captured_in(function.options)
            of_modules = [each for module in captured.modules for _, each in _state.tensors_of(module)]
            places &= {*map(_state.address, captured.tensors)} - {*map(_state.address, of_modules)}
            for name, obj in map(names.__getitem__, places):
                raise ValueError(
                    f"cannot send {function.name!r}: it captures {name!r} of the program's {type(obj).__name__}, "
                    "directly or in a list, a dict or an object, expected none of its parameters and buffers, because "
                    "each worker trains another copy. In the body of a step use the body's own "
                    "model.parameters(); elsewhere call rep.pull() first."
                )

    def _count(self, num_steps: int | None) -> None:
        """Count steps; None after a failed one, of which the ranks know whether it counts."""
        known = self._num_steps
        self._num_steps = None if num_steps is None or known is None else known + num_steps

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, path: files.Path, *, wait: bool = True) -> Future[None] | None:
        """Write a checkpoint. :meth:`load` goes on from it, bit for bit with the same number of workers.

        Parameters
        ----------
        path : path
            A program that is killed at any instruction leaves either the whole old file or the whole new one. The new
            file is first written under this name with ``.part`` behind it.
        wait : bool
            True returns when the file is on the disk, False as soon as the state was copied.

        Returns
        -------
        concurrent.futures.Future or None
            With ``wait=False``, a future. Its ``result()`` returns when the file is on the disk, or raises the error,
            which is also logged at once. The next ``save`` to the same file waits for the future, and so does the end
            of the program.

        Raises
        ------
        OSError
            If the file cannot be written. An older file is not changed.
        TypeError
            If a ``state_dict`` holds something that ``torch.load(weights_only=True)`` refuses.
        ValueError
            As for :meth:`state_dict`.

        Examples
        --------
        >>> import os, tempfile, torch, synk, synk.torch
        >>> path = os.path.join(tempfile.mkdtemp(), "run.pt")
        >>> with synk.fork(2):
        ...     rep = synk.torch.replicate(torch.nn.Linear(2, 1))
        ...     rep.save(path)
        ...     rep.load(path)
        >>> sorted(torch.load(path, weights_only=True))
        ['classes', 'format', 'generators', 'num_steps', 'objects', 'ranks', 'seed']
        """
        return files.save(path, self.state_dict, _checkpoint.write, wait=wait)

    def load(self, path: files.Path) -> None:
        """Bring all objects, here and on all ranks, into the state that :meth:`save` wrote. Runs no code from the file.

        Raises
        ------
        ValueError
            If the file is not a checkpoint, is damaged, or holds the state of other objects. Nothing has changed then.
        OSError
            If it cannot be read.
        """
        self.load_state_dict(_checkpoint.read(path))

    @verb
    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint, as :meth:`save` writes it.

        Returns
        -------
        dict
            A copy. ``"format"``; ``"num_steps"``; ``"seed"``; ``"classes"``: the names of the objects' classes;
            ``"objects"``: their ``state_dict``s on rank 0; ``"ranks"``: the states of each rank's generators;
            ``"generators"``: those of the program.

        Raises
        ------
        ValueError
            If the program has changed the objects and not sent them.
        """
        self._before_call(trains=False)
        ranks = self._on_ranks("checkpoint")
        return {
            "format": _checkpoint.FORMAT,
            "num_steps": ranks[0]["num_steps"],
            "seed": ranks[0]["seed"],
            "classes": [type(obj).__name__ for obj in self._objects],
            "objects": ranks[0]["objects"],
            "ranks": [each["generators"] for each in ranks],
            "generators": _checkpoint.plain(generator_states()),
        }

    @verb
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring all objects, here and on all ranks, into a state that :meth:`state_dict` returned.

        Raises
        ------
        ValueError
            If ``state`` is not such a dict, or belongs to other objects. Nothing has changed then.
        """
        _checkpoint.check(state, self._objects)
        with self._lock:
            with self._guard.lifted():
                _checkpoint.load_objects(self._objects, state)
            self._options = replace(self._options, seed=state["seed"])
            self._replace(state["num_steps"])
            if len(state["ranks"]) == self._runtime.world_size:
                self._on_ranks("take_generators", state["ranks"])
            _checkpoint.load_generators(state["generators"])

    def _leave(self, session: Any, /) -> None:
        """Bring the objects up to date one last time: the runtime is about to be closed, and the workers still answer.

        If they do not, a warning says that the objects are behind; closing goes on.
        """
        try:
            self.pull()
        except Exception as error:
            self._guard.set_behind(False)
            warn_at_users_line(
                f"{_state.names_of(self._objects)} could not be brought up to date before the runtime was closed, and "
                f"holds what it held at the last pull: {error}",
                RuntimeWarning,
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "cannot pickle what replicate() has returned: it belongs to the program. In the body of a step use its own "
            "parameters, which are the worker's objects."
        )

    def __repr__(self) -> str:
        count = (self._num_steps or 0) - self._num_here
        if not self._guard.is_behind:
            age = "is up to date"
        elif count > 0:
            age = f"is {count} step{'s' * (count > 1)} old"
        else:
            age = "may be older than a step that has failed"
        return f"<synk.torch.Replicated {_state.names_of(self._objects)}: the program's copy {age}>"
