"""What a resident object is in the program, wherever its state lies: a name, a pickle, and why its state is lost."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from synk._code.handles import HandlePickler
from synk._wire.residents import methods_of
from synk.errors import ClosedError, SerializationError, WorkerDied


class ResidentValue:
    """A resident object as the program has it.

    Attributes
    ----------
    name : str
    lost : str
        Why no rank has its state any more; empty if some rank does.
    has_dump : bool
        Whether its state is what a ``dump`` returns, and no pickle of the whole.
    classes : list of type
        The classes that its pickle names. Functions that use the object capture those of the program.
    """

    name: str
    lost: str
    _dump: Any
    _load: Any

    def _pickled(self, value: Any) -> bytes:
        dump, load = (self._dump, self._load) if self._load is not None else methods_of(value)
        self.has_dump = load is not None
        file = io.BytesIO()
        try:
            pickler = HandlePickler(file)
            pickler.dump((value, dump, load))
        except Exception as error:
            raise SerializationError(
                f"cannot send resident object {self.name!r} to the workers: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Make it of what can be pickled."
            ) from error
        self.classes = pickler.named
        self._note_handles(pickler.handles)
        return file.getvalue()

    def _note_handles(self, handles: Sequence[Any]) -> None:
        """Called with the handles of other things on the workers that the pickle refers to."""

    def check(self, verb: str) -> None:
        """Raise if the state is lost.

        Raises
        ------
        WorkerDied
        """
        if self.lost:
            raise WorkerDied(f"cannot {verb}: {self.lost} Give it a new one with its set(...).", phase="idle")

    def check_has_dump(self, verb: str) -> None:
        """Raise if the state is a pickle, which would run code when it is loaded.

        Raises
        ------
        TypeError
        """
        if not self.has_dump:
            raise TypeError(
                f"cannot {verb}: got an object without dump and load, expected one with them, because the pickle of an "
                "object runs code when it is loaded. Make it by synk.resident(obj, dump=..., load=...)."
            )


def check_owner(resident: Any, residents: Any, what: str) -> None:
    """Raise if ``resident`` belongs to another runtime."""
    if resident.residents is not residents:
        if resident.residents.is_closed:
            raise ClosedError(
                f"cannot use {what}: the runtime of resident object {resident.name!r} was closed. Make it again."
            )
        raise ValueError(f"cannot use {what}: resident object {resident.name!r} belongs to another runtime.")
