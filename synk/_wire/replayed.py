"""What a rank knows when a body begins, for :func:`synk.replay`; a function that is run under cProfile."""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import random as random  # imported later, in a body, it would be seeded by the system
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from synk._pure.environment import imported_late
from synk._pure.generators import generator_states
from synk._wire.apart import Around
from synk._wire.cell import cell
from synk._wire.parcels import dumps
from synk.errors import UnsupportedError

if TYPE_CHECKING:
    import pstats


class Profiled(Around):
    """Calls a function under cProfile. The statistics come as bytes, so that they are one output."""

    def __call__(self, *args: Any, **kwargs: Any) -> bytes:
        profile = imported_late("cProfile").Profile()
        profile.runcall(self._fn, *args, **kwargs)
        profile.create_stats()
        return marshal.dumps(profile.stats)


def stats_of(raw: bytes) -> pstats.Stats:
    """Return the statistics that a rank sent."""
    figures = types.SimpleNamespace(stats=marshal.loads(raw), create_stats=lambda: None)
    stats: pstats.Stats = imported_late("pstats").Stats(figures)
    return stats


class Moment(NamedTuple):
    """What a rank knows when a body begins.

    Attributes
    ----------
    generators : dict
        The states of the process-wide random number generators.
    rng : BitGenerator
        The rank's own.
    """

    rank: int
    ranks: tuple[int, ...]
    device: str
    generators: dict[str, Any]
    rng: Any


def moment() -> Moment:
    """Return what this rank knows now."""
    worker = cell.worker
    rng = worker.rng.bit_generator  # first, since this imports NumPy's generators
    return Moment(worker.rank, worker.ranks, worker.backend.device, generator_states(), rng)


class Taken(Around):
    """Returns the arguments with which a rank would call a function, pickled, and its rows, in place of a call.

    Parameters
    ----------
    fn : callable
    rank : int
        The only rank that returns them.
    """

    def __init__(self, fn: Callable[..., Any], rank: int) -> None:
        super().__init__(fn)
        self._rank = rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker = cell.worker
        if worker.rank != self._rank:
            return None
        return dumps((args, kwargs)), worker.ranks, worker.num_rows, worker.total_rows  # read-only arrays stay so


class Noted(Around):
    """Calls a function with a numbered item. What the rank knows before is in a file until the call has succeeded.

    Parameters
    ----------
    fn : callable
    folder : str
        Where the file is; its name is the item's number.
    """

    def __init__(self, fn: Callable[..., Any], folder: str) -> None:
        super().__init__(fn)
        self._folder = folder

    def __call__(self, number: int, /, *args: Any) -> Any:
        path = os.path.join(self._folder, str(number))
        with open(path, "wb") as file:
            pickle.dump((moment(), dumps((args, {}))), file)
        result = self._fn(*args)
        os.unlink(path)
        return result


class ReplayedRank:
    """Stands for the rank in ``synk.comm``, for a body that runs without the other ranks."""

    def __init__(self, moment: Moment, ranks: tuple[int, ...], num_rows: int, total_rows: int) -> None:
        self.rank, self.ranks, self.num_rows, self.total_rows = moment.rank, ranks, num_rows, total_rows
        self.backend, self.device, self.rng = self, moment.device, np.random.Generator(moment.rng)
        self.thread = threading.get_ident()

    def check_called(self) -> None:
        """Allow it: the body has begun."""

    def uninterrupted(self) -> contextlib.AbstractContextManager[None]:
        """Hold nothing back."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"cannot use {name!r} in a replay: it runs one rank without the others, expected a body that does not "
            "communicate. Call the function on a runtime with num_workers=0 instead."
        )
