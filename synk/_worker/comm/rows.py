"""Collectives of rows: gather, scatter and all_to_all of blocks, whose lengths need not be equal.

They go through host memory, even between devices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._worker.comm.user_arrays import UserArrays
from synk.communicators._checks import named_dtype
from synk.communicators._host import HostCommunicator
from synk.communicators._schedule import Steps


class RowCollectives:
    """The collectives of rows in the current call.

    Parameters
    ----------
    host : HostCommunicator
        The communicator, which has begun the call.
    arrays : UserArrays
    """

    def __init__(self, host: HostCommunicator, arrays: UserArrays) -> None:
        self._host = host
        self._arrays = arrays
        self._position = host.ranks.index(host.rank)

    def gather(self, array: Any, root: int, sizes: Sequence[int] | None, out: Any) -> Steps:
        rows = self._rows("gather", array)
        root = self._host.member("gather", "root", root)
        if sizes is not None and self._checked_sizes("gather", sizes)[self._position] != len(rows):
            raise ValueError(
                f"cannot gather: got {len(rows)} rows and sizes={list(sizes)} on rank {self._host.rank}, expected the "
                "number of its rows there."
            )
        joined = yield from self._exchange("gather", rows, None, root, out)
        return None if joined is None else self._arrays.received(joined, out)

    def all_gather(self, array: Any, axis: int, out: Any) -> Steps:
        rows = self._rows("all_gather", array)
        if not -rows.ndim <= operator.index(axis) < rows.ndim:
            raise ValueError(
                f"cannot all_gather along axis={axis}: got an array of shape {rows.shape}, expected "
                f"{-rows.ndim} <= axis < {rows.ndim}."
            )
        kind, moved = "all_gather along an axis", np.moveaxis(rows, axis, 0)
        if axis in (0, -moved.ndim):
            joined = yield from self._exchange(kind, moved, None, -1, out)
            return self._arrays.received(joined, out)
        joined = yield from self._exchange(kind, np.ascontiguousarray(moved), None, -1, None)
        joined = np.moveaxis(joined, 0, axis)
        if out is None:
            return self._arrays.from_host(joined)
        place = self._arrays.host_place(out, joined.shape, joined.dtype)
        place[...] = joined
        return self._arrays.received(place, out)

    def scatter(self, array: Any, root: int, sizes: Sequence[int] | None, out: Any) -> Steps:
        root = self._host.member("scatter", "root", root)
        rows, blocks = None, None
        if self._host.rank == root:
            rows = self._rows("scatter", array)
            blocks = self._block_sizes("scatter", rows, sizes)
        return self._arrays.received((yield from self._exchange("scatter", rows, blocks, root, out)), out)

    def all_to_all(self, array: Any, sizes: Sequence[int] | None, out: Any) -> Steps:
        rows = self._rows("all_to_all", array)
        blocks = self._block_sizes("all_to_all", rows, sizes)
        return self._arrays.received((yield from self._exchange("all_to_all", rows, blocks, -1, out)), out)

    def _exchange(self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, out: Any) -> Steps:
        host, arrays = self._host, self._arrays
        place = functools.partial(arrays.host_place, out)
        return host.exchange_steps(kind, arrays.apart(rows, out), sizes, root, place)

    def _rows(self, kind: str, array: Any) -> np.ndarray:
        rows = self._arrays.to_host(array)
        named_dtype(dtype_name(rows.dtype))  # raises if the others could not read it
        if rows.ndim == 0:
            raise ValueError(f"cannot {kind}: got an array without axes, expected rows. Pass numpy.atleast_1d(array).")
        return rows

    def _block_sizes(self, kind: str, rows: np.ndarray, sizes: Sequence[int] | None) -> list[int]:
        """Return how many rows are for each rank: ``sizes``, or the same number for all."""
        num_ranks = len(self._host.ranks)
        if sizes is None:
            if len(rows) % num_ranks:
                raise ValueError(
                    f"cannot {kind}: got {len(rows)} rows, expected a multiple of {num_ranks} (the ranks of the "
                    "call). Pass sizes= for blocks of different lengths."
                )
            return [len(rows) // num_ranks] * num_ranks
        checked = self._checked_sizes(kind, sizes)
        if sum(checked) != len(rows):
            raise ValueError(f"cannot {kind}: got sizes={checked} for {len(rows)} rows, expected as many in all.")
        return checked

    def _checked_sizes(self, kind: str, sizes: Sequence[int]) -> list[int]:
        found, num_ranks = [int(size) for size in sizes], len(self._host.ranks)
        if len(found) != num_ranks or min(found) < 0:
            raise ValueError(
                f"cannot {kind}: got sizes={found}, expected a number of rows for each of the {num_ranks} ranks of the "
                "call."
            )
        return found
