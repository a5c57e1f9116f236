"""``DataParallel``: a module whose forward and backward passes run on all workers; all else stays in the program."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from synk._api.current import current
from synk._api.runtime import Runtime
from synk._pure.nested import check_no_list, paths, take_apart
from synk.torch._nesting import take
from synk.torch._placed import Placed


class DataParallel(torch.nn.Module):
    """A module whose calls run on all workers: a drop-in for ``torch.nn.DataParallel``, also without GPUs.

    The rows of a call's tensors are divided among the workers, and the outputs are gathered. ``backward()`` computes
    the gradients of all rows. The loss, the optimizer, schedulers and checkpoints stay as they are, and so does the
    module: this object has all attributes, methods and names of the module, is an instance of its class, and is pickled
    and copied as one. The module itself is ``.module``. It shares everything with this object, and its calls run in the
    program.

    Parameters
    ----------
    module : torch.nn.Module
        A module on the CPU. Its forward pass must treat each row by itself. It must return tensors with a row for each
        row of its inputs, or single numbers that are means over the rows, as a loss is. Single numbers are averaged
        over the workers, weighted by rows.
    bcast_inputs : str or sequence of str
        Parameters of ``forward`` that every worker gets whole. Tensors without axes are always whole.
    runtime : Runtime, optional
        By default the current one.

    Raises
    ------
    TypeError
        If ``module`` is not a module, or is parallel already.
    ValueError
        If the module has lazy parameters without a shape, or parameters or buffers that overlap in memory, or
        ``bcast_inputs`` names no parameter of ``forward``. A call raises it if the tensors to divide have different
        numbers of rows.
    UnsupportedError
        If the module is on a GPU: it stays on the CPU, and the workers bring its parameters to their devices. Also if
        the runtime's workers are on other nodes.
    SerializationError
        If the module cannot be pickled.
    WorkerDied
        From ``backward()``, if a worker was started again since the forward pass.

    Warns
    -----
    UserWarning
        At the first call in which the first worker has four rows, if a single number is not a mean over rows
        (``reduction="sum"``, labels of -100). To find out, this worker runs the forward pass on parts of its rows, in
        ``eval()``.

    Notes
    -----
    The results equal the serial loop except for rounding, with two exceptions: a batch norm in training mode normalises
    over the rows of each worker, and dropout draws other numbers. Buffers that a forward pass changes come back from
    rank 0; other attributes that it assigns stay on the workers. A call whose tensors have no rows runs in the program,
    and so do all calls after the runtime was closed. The workers' random numbers are seeded by
    ``torch.initial_seed()``, the number of the call and the rank.

    Workers on GPUs keep the parameters there, and get them again with the first forward pass after a change in the
    program; gradients are summed on the devices and brought back once. So each step of training moves the parameters
    over the bus twice, which ``replicate`` does not. Not yet run on GPUs.

    Examples
    --------
    >>> import torch, synk, synk.torch
    >>> with synk.fork(2):
    ...     model = synk.torch.DataParallel(torch.nn.Linear(2, 1))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    ...     for _ in range(200):
    ...         optimizer.zero_grad()
    ...         loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...     bool(loss < 0.1), list(model.state_dict())
    (True, ['weight', 'bias'])
    """

    __slots__ = ("_synk_passes",)
    _synk_passes: _Passes

    def __new__(cls, module: Any, *args: Any, **kwargs: Any) -> DataParallel:
        if not isinstance(module, torch.nn.Module) or isinstance(module, DataParallel):
            raise TypeError(
                f"cannot make DataParallel: got {type(module).__name__}, expected a torch.nn.Module that is not "
                "parallel yet."
            )
        own = type(module)
        # The object claims to be of the module's class, and its pickles and copies are.
        names = {"__slots__": (), "__class__": property(lambda self: own), "__doc__": own.__doc__}
        made = types.new_class(
            f"DataParallel[{own.__name__}]", (DataParallel, own), {}, lambda each: each.update(names)
        )
        self: DataParallel = object.__new__(made)
        self.__dict__ = module.__dict__  # both are one object in everything except the class
        return self

    def __init__(
        self, module: torch.nn.Module, *, bcast_inputs: str | Sequence[str] = (), runtime: Runtime | None = None
    ) -> None:
        names = (bcast_inputs,) if isinstance(bcast_inputs, str) else tuple(bcast_inputs)
        runtime = current() if runtime is None else runtime
        what = f"wrap a {type(module).__name__} in DataParallel"
        runtime._session.check_here(what, "Train with synk.torch.replicate, which keeps the modules on the ranks.")
        object.__setattr__(self, "_synk_passes", _Passes(module, names, runtime))

    @property
    def forward(self) -> Callable[..., Any]:
        run = functools.partial(self._synk_passes.run)
        return functools.wraps(self._synk_passes.module.forward)(run)

    @forward.setter
    def forward(self, fn: Callable[..., Any]) -> None:
        self.__dict__["forward"] = fn

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return self._synk_passes.module
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._synk_passes.module.__reduce_ex__(protocol)


class _Passes:
    """The forward and backward passes of one ``DataParallel``.

    Attributes
    ----------
    module : torch.nn.Module
    """

    def __init__(self, module: torch.nn.Module, bcast_inputs: tuple[str, ...], runtime: Runtime) -> None:
        self.module = module
        self._name = type(module).__name__
        self._runtime = runtime
        self._bcast_inputs = bcast_inputs
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._check_bcast_inputs()
        self._placed = Placed(module, runtime)

    def _check_bcast_inputs(self) -> None:
        known = inspect.signature(self.module.forward).parameters if self._bcast_inputs else {}
        for name in self._bcast_inputs:
            if name not in known:
                raise ValueError(
                    f"cannot make DataParallel of {self._name!r}: got {name!r} in bcast_inputs, expected one of the "
                    f"parameters of its forward ({', '.join(known)})."
                )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass on the workers. It runs in the program if they are gone or there are no rows to divide."""
        session = self._runtime._session
        rows: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        is_here = self._runtime.is_closed or not session.is_own_process or session.workers.is_inline
        if not is_here:
            nesting = self._taken(args, kwargs, rows, whole)
        if is_here or not rows or not len(rows[0]):
            return self.module.forward(*args, **kwargs)
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"cannot scatter the inputs of {self._name!r}: got tensors with {', '.join(map(str, lengths))} rows, "
                "expected equal axis-0 lengths. Name what every worker needs whole in DataParallel(..., bcast_inputs=)."
            )
        # A backward pass of this or of an earlier ``Placed`` may run meanwhile, in a thread of its own. So each has a
        # lock, under which a message is made and sent: it says what has changed since the one before (``_message``).
        with self._lock:
            placed = self._placed = self._placed.renewed()
            with placed.lock:
                return placed.forward(nesting, rows, whole, next(self._numbers))

    def _check_lists(self, label: str, value: Any) -> None:
        leaves, structure = take_apart(value)
        for leaf, path in zip(leaves, paths(structure)):
            where = f"{label}{path}"
            check_no_list(leaf, "scatter", f"{where} of {self._name!r}", where, "" if path else "model")

    def _taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[torch.Tensor], whole: list[torch.Tensor]
    ) -> Any:
        """Return the nesting of the arguments without their tensors."""
        own = self._bcast_inputs
        positional, by_name = self._names(args, kwargs) if own else ([f"args[{k}]" for k in range(len(args))], kwargs)
        for label, name, value in (*zip(positional, positional, args), *zip(kwargs, by_name, kwargs.values())):
            if name not in own:
                self._check_lists(label, value)
        taken = [take(value, rows, whole, name in own) for name, value in zip(positional, args)]
        named = zip(kwargs.items(), by_name)
        return taken, {key: take(value, rows, whole, name in own) for (key, value), name in named}

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Return the names of the parameters of ``forward`` to which the arguments go."""
        signature = inspect.signature(self.module.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cannot call {self._name!r}: {error}.") from None
        parameters = signature.parameters.values()
        rest = {each.kind: each.name for each in parameters}  # of ``*args`` and of ``**kwargs`` there is one
        ordered = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        ordered += [rest.get(inspect.Parameter.VAR_POSITIONAL, "")] * (len(args) - len(ordered))
        return ordered[: len(args)], [
            key if key in signature.parameters else rest[inspect.Parameter.VAR_KEYWORD] for key in kwargs
        ]
