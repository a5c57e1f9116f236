"""Shared variables on a device: replicas and shards as device arrays, which reach the host only when the master asks.

The buffers in shared memory, which are everything on a CPU worker, are the way in and out here. What the master writes
there is brought to the device at the next use (the master counts such changes: ``Declaration.content``); what functions
assign stays on the device until a ``Fetch``. The transaction is the same: the new value goes to a second set of arrays,
which takes the first one's place when the master has committed the call.
"""

from __future__ import annotations

from typing import Any

from synk._device_comm import DeviceCollectives
from synk._messages import Down
from synk._variables import Declaration, Replica, VariableStore


class DeviceReplica(Replica):
    """One variable on one rank with a device."""

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
        if self._pending is not None:
            return self._pending
        front = self._device[self._front]
        if front is None:
            backend = self._store.backend
            front = self._device[self._front] = [backend.from_host(host) for host in self._arrays(self._front)]
        return front

    def _keep(self, array: Any, dtype: Any) -> Any:
        return self._store.backend.xp.asarray(array, dtype=dtype, order="C")

    def store(self) -> bool:
        """Copy the pending value to the second arrays; return False if it must be shown too and has no room there."""
        if self._is_shown() and not super().store():
            return False
        self.store_on_device()
        return True

    def store_on_device(self) -> None:
        """Copy the pending value to the second arrays."""
        back = 1 - self._front
        self._shapes[back] = self.pending_shapes()
        xp = self._store.backend.xp
        assert self._pending is not None
        targets = self._device[back]
        if targets is None or any(target.shape != source.shape for target, source in zip(targets, self._pending)):
            targets = self._device[back] = [xp.empty(source.shape, source.dtype) for source in self._pending]
        for target, source in zip(targets, self._pending):
            target[...] = source

    def exchange(self, kind: str, op: str, collectives: DeviceCollectives) -> None:
        """Do this rank's part of a collective; the result is pending then."""
        with collectives.guard():
            if kind == "broadcast":
                self._pending = collectives.broadcast_all(self._broadcast_leaves(), 0)
                return
            leaves = [self._keep(leaf, leaf.dtype) for leaf in self.leaves()]
            if kind == "all_reduce":
                self._pending = collectives.reduce_all([(leaf, op, None) for leaf in leaves])
            else:
                stacks = collectives.gather_all(leaves)
                self._pending = [stack.reshape(-1, *stack.shape[2:]) for stack in stacks]

    def _broadcast_leaves(self) -> list[Any]:
        """Return rank 0's value, and elsewhere arrays for it: the own value may be lost."""
        if self._store.rank == 0:
            return [self._keep(leaf, leaf.dtype) for leaf in self.leaves()]
        empty = self._store.backend.xp.empty
        return [empty(shape, dtype) for shape, dtype in zip(self._shapes[self._front], self._known.dtypes)]

    def _is_shown(self) -> bool:
        """Whether ranks that do not take part in the call follow this one: the lowest that does."""
        participates = self._store.down[:, Down.PARTICIPATES]
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
