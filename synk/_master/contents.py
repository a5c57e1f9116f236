"""What a ``Data`` holds, and what of it the master's half uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from synk._master.session import Session
from synk._wire.memory import Segment
from synk.errors import ClosedError


class Contents(NamedTuple):
    """What a ``Data`` holds at one moment, or where an array lies in a file.

    Replaced as a whole, so that whoever has taken it has the memory and the rows of one moment.
    """

    segment: Segment | None
    array: np.ndarray
    offset: int = 0
    """Of the array in the segment, in bytes."""

    @property
    def segment_id(self) -> int:
        return self.segment.id if self.segment is not None else 0


class DataHandle:
    """The base of :class:`synk.Data`. Calls know one by its class; a mark could be borne by other objects."""

    _session: Session
    _contents: Contents
    _ndim: int
    name: str | None

    @property
    def _label(self) -> str:
        return f"Data {self.name!r}" if self.name else "Data"

    @property
    def data(self) -> np.ndarray:
        """The array, a view of the shared memory; shape as ``shape``."""
        self._session.check_open(f"use {self._label}")
        return self._await_readers().array

    @property
    def ndim(self) -> int:
        return self._ndim

    def _await_readers(self) -> Contents:
        """Wait for submitted calls that read this: they must see it as it was. Return what may be written to."""
        while True:
            contents = self._contents
            if contents.segment is not None:
                self._session.queue.release(contents.segment)
            if self._contents is contents:
                return contents

    def _check_owner(self, session: Session, what: str) -> None:
        """Raise where this belongs to another runtime."""
        if self._session is not session:
            if self._session.is_closed:
                raise ClosedError(f"cannot pass {what}: its runtime was closed. Make it again with synk.data(...).")
            raise ValueError(
                f"cannot pass {what}: it belongs to another runtime. Make it with this runtime's data(...)."
            )
