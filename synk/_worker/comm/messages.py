"""Messages between two ranks, and the collectives that are made of them: blocks of rows to or from each rank.

They go through host memory, on devices too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._worker.comm.requests import Request
from synk._worker.comm.user_arrays import UserArrays
from synk.communicators._buffers import named_dtype
from synk.communicators._shm import ShmCommunicator
from synk.errors import CollectiveMismatch

# No message of a function has it.
_BLOCK_TAG = -1


class Messages:
    """The messages of the call under way.

    Parameters
    ----------
    host : ShmCommunicator
        That has begun the call.
    arrays : UserArrays
    """

    def __init__(self, host: ShmCommunicator, arrays: UserArrays) -> None:
        self._host = host
        self._arrays = arrays

    def send(self, array: Any, peer: int, tag: int) -> None:
        peer = self._host.member("send", "peer", peer)
        self._host.send_array(self._arrays.to_host(array), peer, _checked(tag))

    def isend(self, array: Any, peer: int, tag: int) -> Request:
        peer = self._host.member("send", "peer", peer)
        self._host.isend_array(self._arrays.to_host(array), peer, _checked(tag))
        return Request(self._host, lambda: True, lambda: None)

    def recv(self, peer: int, tag: int, like: Any, out: Any) -> Any:
        return self.irecv(peer, tag, like, out).wait()

    def irecv(self, peer: int, tag: int, like: Any, out: Any) -> Request:
        host, arrays = self._host, self._arrays
        peer = host.member("recv", "peer", peer)
        message = host.irecv_array(arrays.host_target(like, out), peer, _checked(tag))
        return Request(
            host,
            lambda: host.test_message(message),
            lambda: arrays.received(host.finish_message(message), out),
        )

    # -- blocks of rows -----------------------------------------------------------------------------------------------

    def gather(self, array: Any, root: int, sizes: Sequence[int] | None) -> Any:
        host, mine = self._host, self._rows("gather", array)
        root = host.member("gather", "root", root)
        if sizes is not None and self._checked_sizes("gather", sizes)[host.ranks.index(host.rank)] != len(mine):
            raise ValueError(
                f"cannot gather: got {len(mine)} rows and sizes={list(sizes)} on rank {host.rank}, expected the number "
                "of its rows there."
            )
        self._agree("gather", mine, root)
        if host.rank != root:
            host.send_array(mine, root, _BLOCK_TAG)
            return None
        return self._arrays.from_host(self._joined("gather", mine, {root: mine}))

    def all_gather(self, array: Any, axis: int) -> Any:
        mine = np.moveaxis(self._rows("all_gather", array), axis, 0)
        self._agree("all_gather along an axis", mine, -1)
        for rank in self._others():
            self._host.send_array(mine, rank, _BLOCK_TAG)
        return self._arrays.from_host(np.moveaxis(self._joined("all_gather", mine, {self._host.rank: mine}), 0, axis))

    def scatter(self, array: Any, root: int, sizes: Sequence[int] | None) -> Any:
        host = self._host
        root = host.member("scatter", "root", root)
        blocks: dict[int, np.ndarray] = {}
        if host.rank == root:
            blocks = self._blocks("scatter", self._rows("scatter", array), sizes)
        host.run(host.agree_steps("scatter", "", 0, peer=root))
        for rank, block in blocks.items():
            if rank != root:
                host.send_array(block, rank, _BLOCK_TAG)
        return self._arrays.from_host(
            blocks[root].copy() if host.rank == root else host.recv_array(None, root, _BLOCK_TAG)
        )

    def all_to_all(self, array: Any, sizes: Sequence[int] | None) -> Any:
        host, mine = self._host, self._rows("all_to_all", array)
        blocks = self._blocks("all_to_all", mine, sizes)
        self._agree("all_to_all", mine, -1)
        for rank in self._others():
            host.send_array(blocks[rank], rank, _BLOCK_TAG)
        return self._arrays.from_host(self._joined("all_to_all", mine, {host.rank: blocks[host.rank]}))

    def _others(self) -> tuple[int, ...]:
        """Return the other ranks from the next one on: so that not all send to the same one at once."""
        ranks, position = self._host.ranks, self._host.ranks.index(self._host.rank)
        return (*ranks[position + 1 :], *ranks[:position])

    def _agree(self, kind: str, rows: np.ndarray, root: int) -> None:
        """Make sure that all ranks are about to do the same, with rows of the same length."""
        row_size = int(np.prod(rows.shape[1:], dtype=np.int64))
        self._host.run(self._host.agree_steps(kind, dtype_name(rows.dtype), row_size, peer=root))

    def _rows(self, kind: str, array: Any) -> np.ndarray:
        rows = self._arrays.to_host(array)
        named_dtype(dtype_name(rows.dtype))  # refuses what the others could not read
        if rows.ndim == 0:
            raise ValueError(f"cannot {kind}: got an array without axes, expected rows. Pass numpy.atleast_1d(array).")
        return rows

    def _blocks(self, kind: str, rows: np.ndarray, sizes: Sequence[int] | None) -> dict[int, np.ndarray]:
        """Divide rows among the ranks: as ``sizes`` say, or into equal blocks."""
        ranks = self._host.ranks
        if sizes is None:
            if len(rows) % len(ranks):
                raise ValueError(
                    f"cannot {kind}: got {len(rows)} rows, expected a multiple of {len(ranks)} (the ranks of the "
                    "call). Pass sizes= for blocks of different lengths."
                )
            sizes = [len(rows) // len(ranks)] * len(ranks)
        sizes = self._checked_sizes(kind, sizes)
        if sum(sizes) != len(rows):
            raise ValueError(f"cannot {kind}: got sizes={sizes} for {len(rows)} rows, expected as many in all.")
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return {rank: rows[start:stop] for rank, (start, stop) in zip(ranks, bounds)}

    def _checked_sizes(self, kind: str, sizes: Sequence[int]) -> list[int]:
        found, num_ranks = [int(size) for size in sizes], len(self._host.ranks)
        if len(found) != num_ranks or min(found) < 0:
            raise ValueError(
                f"cannot {kind}: got sizes={found}, expected a number of rows for each of the {num_ranks} ranks of the "
                "call."
            )
        return found

    def _joined(self, kind: str, rows: np.ndarray, own: dict[int, np.ndarray]) -> np.ndarray:
        """Receive the blocks of all other ranks, and join them in the order of the ranks."""
        host = self._host
        parts = [own[rank] if rank in own else host.recv_array(None, rank, _BLOCK_TAG) for rank in host.ranks]
        for rank, part in zip(host.ranks, parts):
            if part.shape[1:] != rows.shape[1:]:
                raise CollectiveMismatch(
                    f"cannot {kind} on rank {host.rank}: got rows of shape {part.shape[1:]} from rank {rank}, expected "
                    f"{rows.shape[1:]}. Bring rows of one shape on all ranks."
                )
        return np.concatenate(parts)


def _checked(tag: int) -> int:
    if not isinstance(tag, (int, np.integer)) or tag < 0:
        raise ValueError(f"cannot send or receive a message: got tag={tag!r}, expected an int from 0 on.")
    return int(tag)
