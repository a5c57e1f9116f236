"""Shared variables on a device: replicas and shards as device arrays, which reach the host only when the master asks.

On a CPU worker the buffers in shared memory hold the value. Here they are only the way in and out. What the master
writes there goes to the device at the next use (the master counts such changes in ``Declaration.content``). What
functions assign stays on the device until a ``Fetch``. The transaction is the same: the new value goes to a second set
of arrays, which takes the place of the first one when the master has committed the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from synk._wire.control import Down
from synk._wire.variables import Declaration, shapes_of
from synk._worker.held.variables import Replica, VariableStore

if TYPE_CHECKING:
    from synk.cuda._collectives import NcclCollectives


class DeviceReplica(Replica):
    """One variable on one rank with a device."""

    __slots__ = ("_content", "_device")

    def __init__(self, store: VariableStore) -> None:
        super().__init__(store)
        self._device: list[list[Any] | None] = [None, None]
        self._content = -1

    def declare(self, declaration: Declaration) -> None:
        super().declare(declaration)
        if declaration.content != self._content:
            self._device = [None, None]
            self._content = declaration.content

    def leaves(self) -> list[Any]:
        """The arrays of the value as this call sees it. A function must not write into them."""
        current = self._store.assigned.get(self)
        if current is not None:
            return current
        front = self._device[self._front]
        if front is None:
            backend = self._store.backend
            front = self._device[self._front] = [backend.from_host(host) for host in self._arrays(self._front)]
        return front

    def keep(self, array: Any, dtype: Any) -> Any:
        return self._store.backend.xp.asarray(array, dtype=dtype, order="C")

    def store(self, pending: Sequence[Any]) -> bool:
        """Copy an assigned value to the second arrays, and to shared memory if absent ranks need it there.

        Return False if the buffer there has no room for it.
        """
        if self._is_shown() and not super().store(pending):
            return False
        self.store_on_device(pending)
        return True

    def store_on_device(self, pending: Sequence[Any]) -> None:
        """Copy a new value to the second arrays."""
        # The value in the first arrays is not touched. The copies below are only queued on the device. The rank
        # synchronises it before it replies, so they are complete when the master commits.
        back = 1 - self._front
        self._shapes[back] = shapes_of(pending)
        xp = self._store.backend.xp
        targets = self._device[back]
        if targets is None or any(target.shape != source.shape for target, source in zip(targets, pending)):
            targets = self._device[back] = [xp.empty(source.shape, dtype=source.dtype) for source in pending]
        for target, source in zip(targets, pending):
            target[...] = source

    def collective(self, kind: str, op: str, collectives: NcclCollectives) -> list[Any]:
        """Do this rank's part of a collective over the variable, and return the new arrays."""
        with collectives.guard():
            if kind == "broadcast":
                return collectives.broadcast_all(self._broadcast_leaves(), 0)
            leaves = [self.keep(leaf, leaf.dtype) for leaf in self.leaves()]
            if kind == "all_reduce":
                return collectives.reduce_all([(leaf, op, None) for leaf in leaves])
            return [stack.reshape(-1, *stack.shape[2:]) for stack in collectives.gather_all(leaves)]

    def _broadcast_leaves(self) -> list[Any]:
        """Return the value on rank 0, and empty arrays for it elsewhere, where the value may be lost."""
        if self._store.rank == 0:
            return [self.keep(leaf, leaf.dtype) for leaf in self.leaves()]
        empty = self._store.backend.xp.empty
        return [empty(shape, dtype=dtype) for shape, dtype in zip(self._shapes[self._front], self._known.dtypes)]

    def _is_shown(self) -> bool:
        """Whether ranks that are absent from the call take their value from this one: the lowest that takes part."""
        participates = self._store.call_down[:, Down.PARTICIPATES]
        if self._known.is_sharded or participates.all():
            return False
        return int(participates.argmax()) == self._store.rank

    def fetch(self) -> None:
        """Copy the value into the buffer in shared memory."""
        for host, array in zip(self._arrays(self._front), self.leaves()):
            self._store.backend.to_host(array, host)

    def close(self) -> None:
        super().close()
        self._device = [None, None]
