"""``replicate``: a model, its optimizer and the objects that belong to them on every rank, trained as one on whole
batches.

This file has the program's half. A call of a step is in ``_steps.py``, a rank's half in ``_rank.py``.

In one file because every verb (a call, pull, push, a checkpoint) begins and ends with the same question:
whether the program's objects or the ranks' objects are behind.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from synk._api.current import current
from synk._api.function import Function
from synk._api.options import Options as FunctionOptions
from synk._api.runtime import Runtime
from synk._master.code.handles import Handle
from synk._master.processes.output import warn_at_users_line
from synk._pure import files
from synk._pure.output_ops import DEFAULT_OP
from synk._pure.tensors import num_torch_threads
from synk._pure.tracebacks import verb
from synk.errors import ReentrancyError
from synk.torch import _checkpoint, _rank, _state, _state_bytes
from synk.torch._links import link, refresh_of, unlink
from synk.torch._module_parts import check_memory
from synk.torch._reduction import Options
from synk.torch._steps import StepFunction
from synk.torch._threads import BusyThreads


@verb
def replicate(
    *objects: Any,
    seed: int = 0,
    sync_batchnorm: bool = False,
    bucket_mb: float = 25.0,
    overlap: bool | str = "auto",
    runtime: Runtime | None = None,
) -> Replicated:
    """Give every rank a copy of a model, its optimizer and everything that belongs to them, and keep all copies alike.

    Parameters
    ----------
    *objects : module, optimizer, scheduler, GradScaler, or anything that has a ``state_dict`` or can be pickled
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
        If there are no objects.
    ValueError
        If an optimizer has a parameter that belongs to no given module, a module has lazy parameters without a shape,
        parameters or buffers that are different tensors share memory, or an option has a value that is not listed.
    SerializationError
        If the objects cannot be pickled.

    Warns
    -----
    UserWarning
        Once, if other threads of the program are busy while it waits for CPU workers. Often these are torch's own
        threads, which take cores from the workers (``torch.set_num_threads(1)``).

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
    _check_optimizers(objects)
    for obj in objects:
        if _state.is_module(obj) and any(
            isinstance(each, torch.nn.parameter.UninitializedParameter) for each in obj.parameters()
        ):
            raise ValueError(
                f"cannot replicate {type(obj).__name__}: it has lazy parameters without a shape, expected a model that "
                "has run once. Call it with a batch first."
            )
    _check_memory(objects)
    if not bucket_mb > 0:
        raise ValueError(f"cannot replicate: got bucket_mb={bucket_mb!r}, expected a positive number.")
    if not (isinstance(overlap, bool) or overlap == "auto"):
        raise ValueError(f"cannot replicate: got overlap={overlap!r}, expected 'auto', True or False.")
    options = Options(int(seed), bool(sync_batchnorm), int(bucket_mb * 1e6), overlap)
    return Replicated(objects, options, current() if runtime is None else runtime)


def _check_memory(objects: Sequence[Any]) -> None:
    modules = [obj for obj in objects if _state.is_module(obj)]
    names = ", ".join(type(obj).__name__ for obj in modules)
    check_memory(f"replicate {names}", (pair for obj in modules for pair in _state.tensors_of(obj)))


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
    """Objects with a copy on every rank, all alike. Made by :func:`synk.torch.replicate`.

    The program goes on using its own objects. Reading one first brings it up to date. Changes that the program makes
    between two calls (a learning rate, ``model.eval()``, ``load_state_dict``, a scheduler's step) reach the ranks
    before the next call. Tensors that were taken from the objects earlier are up to date only after :meth:`pull`.

    Attributes
    ----------
    num_steps : int
        How many calls so far were training steps.
    """

    __slots__ = (
        "__weakref__", "_fingerprints", "_glances", "_is_behind", "_is_busy", "_is_replaced", "_is_touched",
        "_left_out", "_linked", "_lock", "_objects", "_options", "_resident", "_runtime", "_threads",
    )  # fmt: skip

    def __init__(self, objects: Sequence[Any], options: Options, runtime: Runtime) -> None:
        self._objects = tuple(objects)
        self._options = options
        self._runtime = runtime
        self._lock = threading.RLock()
        has_cpu_workers = not runtime._session.has_devices and not runtime._session.workers.is_inline
        self._threads = BusyThreads(num_torch_threads() if has_cpu_workers else 1)
        # Behind: the ranks' objects are newer than the program's. Busy: synk itself reads the objects, which must not
        # pull. Touched: the user has read an object, and may write into a tensor without leaving a trace. Replaced:
        # the objects were replicated once more.
        self._is_behind = self._is_busy = self._is_touched = self._is_replaced = False
        for obj in objects:
            refresh: Any = refresh_of(obj)
            if refresh is not None:
                refresh.__self__._give_up()
        self._left_out: set[str] = set()  # attributes that the user was already told about
        name = ", ".join(type(obj).__name__ for obj in objects)
        self._resident = runtime.resident(
            _rank.RankReplica(objects, options), name=name, dump=_rank.dump, load=_rank.load
        )
        self._referent = None
        self._reference = (_rank.on_rank, (self._resident._reference[1][0],))
        self._note_seen([_state.fingerprint(obj) for obj in objects])
        self._linked = [obj for obj in objects if link(obj, self._refresh)]
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
            Whether a call is a training step. False is for evaluation: the body then runs under ``torch.no_grad()`` and
            must not change the objects.

        Returns
        -------
        StepFunction

        Raises
        ------
        TypeError
            If ``fn`` is not callable, or has fewer parameters than there are objects.
        ValueError
            If an option has a value that is not listed.
        """
        if fn is None:
            return functools.partial(self.function, outputs=outputs, bcast_inputs=bcast_inputs, trains=trains)
        if not callable(fn):
            raise TypeError(f"cannot build a function: got {type(fn).__name__}, expected a callable.")
        return StepFunction(self, fn, outputs=outputs, bcast_inputs=bcast_inputs, trains=trains)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context, inside the body, in which backward passes do not reduce gradients.

        Each rank accumulates its own. The next backward pass outside of the context, in this call or a later one,
        reduces the accumulated gradients.

        Raises
        ------
        ReentrancyError
            In the master.
        """
        raise ReentrancyError(
            "cannot keep gradients back in the master: no_sync() has a meaning inside the function, around backward()."
        )

    # -- the master's objects -----------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return int(self._state("count steps")["num_steps"])

    @verb
    def pull(self) -> None:
        """Bring the master's objects up to date. Reading one of them does so by itself.

        Raises
        ------
        ValueError
            If the program has changed the objects meanwhile, through tensors that were taken from them before.

        Warns
        -----
        RuntimeWarning
            Once for each attribute that cannot be pickled, and so stays each worker's own.
        """
        with self._lock, self._busy():
            if self._is_behind:  # otherwise the program's objects are as new as the ranks', or newer
                self._check_unchanged()
                left_out = set(_state_bytes.load_all(self._objects, self._state("pull")["objects"])) - self._left_out
                self._note_equal()
                if left_out:
                    self._left_out |= left_out
                    warn_at_users_line(
                        f"{', '.join(sorted(left_out))} stays each worker's own, because it cannot be pickled: it does "
                        "not come back, and a worker that takes the place of another one begins without it.",
                        RuntimeWarning,
                    )
            self._is_touched = True  # the reader may write into a tensor, which may leave no trace except its values

    def _state(self, verb: str) -> dict[str, Any]:
        """Return the state of the objects on rank 0. ``begin`` has made ranks alike that differed after a fault."""
        session, resident = self._runtime._session, self._resident._referent
        with session.entered(verb):
            session.begin(verb)
            resident.check(verb)
            state: dict[str, Any] = session.residents.state_of(resident, 0, session.deadline(None))
        return state

    @verb
    def push(self) -> None:
        """Bring all ranks into the state of the master's objects."""
        with self._lock, self._busy():
            self._resident.set(_rank.RankReplica(self._objects, self._options))
            self._note_equal()

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

        Warns
        -----
        UserWarning
            If an object holds something that is neither data nor code. It is left out of the file.

        Examples
        --------
        >>> import os, tempfile, torch, synk, synk.torch
        >>> path = os.path.join(tempfile.mkdtemp(), "run.pt")
        >>> with synk.fork(2):
        ...     rep = synk.torch.replicate(torch.nn.Linear(2, 1))
        ...     rep.save(path)
        ...     rep.load(path)
        >>> sorted(torch.load(path, weights_only=True))
        ['format', 'generators', 'num_steps', 'objects', 'ranks', 'seed']
        """
        return files.save(path, self.state_dict, torch.save, wait=wait)

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

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint, as :meth:`save` writes it: nested dicts, lists and tuples of tensors, numbers and texts.

        Returns
        -------
        dict
            A copy. ``"format"``; ``"num_steps"``; ``"seed"``; ``"objects"``: the class of each object and its state on
            rank 0; ``"ranks"``: for each rank, the entries that differ from rank 0's, and the states of its generators;
            ``"generators"``: the states of the program's generators.
        """
        with self._lock:
            self._before_call(trains=False)
            self.pull()
            ranks = self._own_of_ranks()
            states, left_out = _checkpoint.plain_states(self._objects)
        if left_out:
            warn_at_users_line(
                f"{', '.join(sorted(set(left_out)))}: neither data nor code, so it is not in the checkpoint. What the "
                "program has there when it loads the checkpoint stays.",
                UserWarning,
            )
        return {
            "format": _checkpoint.FORMAT,
            "num_steps": ranks[0].pop("num_steps"),
            "seed": ranks[0].pop("seed"),
            "objects": states,
            "ranks": ranks,
            "generators": _checkpoint.plain_generators(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring all objects, here and on all ranks, into a state that :meth:`state_dict` returned.

        Raises
        ------
        ValueError
            If ``state`` is not such a dict, or belongs to other objects. Nothing has changed then.
        """
        _checkpoint.check_format(state)
        with self._lock, self._busy():
            seen = [pair for pair in zip(self._objects, self._fingerprints) if "shape" in pair[1]]
            if any(_state.fingerprint(obj, before)["shape"] != before["shape"] for obj, before in seen):
                self.push()  # a state can be taken over only by objects with the same tensors as the program's
            _checkpoint.load_plain(self._objects, state["objects"])
            ranks = state["ranks"]
            numbers = {"num_steps": state["num_steps"], "seed": state["seed"], "share": ranks[0]["share"]}
            self._restore({**numbers, "objects": _state_bytes.dump_all(self._objects)}, "load")
            self._options = replace(self._options, seed=state["seed"])
            if len(ranks) == self._runtime.world_size:
                take_own = self._on_ranks("take_own", name="load", updates=[self._resident])
                take_own([_checkpoint.to_bytes(each) for each in ranks])
            self._note_equal()
            _checkpoint.load_generators(state["generators"])

    @property
    def _session(self) -> Any:
        return self._runtime._session

    def _own_of_ranks(self) -> list[dict[str, Any]]:
        """Return each rank's own state. Rank 0's is that of the objects."""
        tell = self._on_ranks("own", name="save")
        ranks: list[dict[str, Any]] = [_checkpoint.from_bytes(each) for each in tell(None)]
        digests = [each.pop("digests") for each in ranks]
        differing = {key for each in digests[1:] for key, value in each.items() if digests[0].get(key) != value}
        own = tell(list(differing)) if differing else None
        for rank, each in enumerate(ranks):
            each["own"] = _checkpoint.from_bytes(own[rank]) if own and rank else []
        return ranks

    def _on_ranks(self, method: str, *, name: str, updates: Sequence[Any] = ()) -> Function[..., Any]:
        """Return a function that calls a method of each rank's ``RankReplica`` with one argument."""
        resident, session = self._resident, self._runtime._session

        def run(given: Any) -> Any:
            return getattr(resident.value, method)(given)

        run.__name__ = name
        options = FunctionOptions.of(run, bcast_inputs="given", outputs=None, per_rank=True, updates=updates)
        return Function(run, options, session)

    def _restore(self, state: dict[str, Any], verb: str) -> None:
        """Bring all ranks into a state that ``_rank.dump`` returned, or into the given parts of one."""
        session, resident = self._runtime._session, self._resident._referent
        with session.entered(verb):
            session.begin(verb)
            if "num_steps" not in state:
                resident.check(verb)
            data = pickle.dumps(state, protocol=5)
            session.residents.restore(resident, data, next(session.numbers), session.deadline(None))

    # -- changes that the ranks do not have yet -----------------------------------------------------------------------

    def _note_equal(self) -> None:
        """Note that the program's objects and the ranks' are alike now."""
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
        """Bring the objects up to date before one of them is read. Every access to an attribute calls this."""
        self._is_touched = self._is_touched or not self._is_busy
        if self._is_behind and not self._is_busy:
            with self._lock:
                if self._is_behind and not self._is_busy:
                    self.pull()

    def _check_unchanged(self) -> None:
        """Raise ValueError if both sides have changed an object: neither may be lost."""
        for obj, before in zip(self._objects, self._fingerprints):
            if self._is_behind and _state.fingerprint(obj, before) != before:
                raise ValueError(
                    f"cannot bring {type(obj).__name__} up to date: it was changed in the master, by way of what was "
                    "taken from it before, while the ranks took steps. Call pull() before you change what "
                    "you have kept."
                )

    def _before_call(self, *, trains: bool) -> None:
        """Send the ranks the program's changes, and note that a step is about to put the program's objects behind.

        This is noted before the call: a call that fails may have changed the ranks' objects all the same.
        """
        if self._is_replaced:
            raise ValueError(
                f"cannot call a function of {self!r}: got objects that were replicated once more, expected those "
                "of the last replicate(), which the program's objects follow. Build it anew: rep.function(...)."
            )
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
                    obj.__dict__["_opt_called"] = True  # a scheduler that steps in the master looks at this

    def _seen(self, index: int, obj: Any) -> dict[str, Any]:
        """Return the fingerprint of an object as it is now. In most calls a glance makes a new one unnecessary."""
        before, glance = self._fingerprints[index], self._glances[index]
        if glance is not None and not self._is_touched and glance.is_same():
            return before
        now = _state.fingerprint(obj, None if self._is_touched else before)
        if now == before:
            self._glances[index] = _state.Glance.of(obj)
        return now

    def _push_changes(self, now: list[dict[str, Any]]) -> None:
        """Send the parts of the objects that have changed, or everything if tensors were replaced."""
        was = self._fingerprints
        if any(one.get(part) != other.get(part) for one, other in zip(now, was) for part in ("shape", "hooks")):
            _check_optimizers(self._objects)
            _check_memory(self._objects)
            self.push()
            return
        changed = {
            index: part
            for index, obj in enumerate(self._objects)
            if (part := _state.changes(obj, was[index], now[index]))
        }
        self._restore({"objects": _state_bytes.as_bytes(self._objects, changed)}, "push")
        self._note_seen(now)

    def _give_up(self) -> None:
        """Bring the objects into the ranks' state and unlink them: they are about to be replicated again."""
        if not self._runtime.is_closed:
            self._refresh()
        self._is_replaced = True
        for obj in self._linked:
            unlink(obj)

    def _leave(self, session: Any, /) -> None:
        """Make the objects ordinary again, with the ranks' last state, because the runtime is about to be closed.

        The workers still answer. If they do not, a warning says that the objects are behind; closing goes on.
        """
        if self._is_replaced:
            return
        try:
            if self._is_behind:
                self.pull()
        except Exception as error:
            warn_at_users_line(
                f"{', '.join(type(obj).__name__ for obj in self._objects)} could not be brought up to date before the "
                f"runtime was closed, and holds what it held at the last pull: {error}",
                RuntimeWarning,
            )
        finally:
            for obj in self._linked:
                unlink(obj)

    def __repr__(self) -> str:
        return f"<synk.torch.Replicated {', '.join(type(obj).__name__ for obj in self._objects)}>"
