"""Calls the plain function in the program: the oracle of ``verify`` that shares nothing with the workers.

It calls a copy on copies of the arguments (``synk._api.plain_copy``), so nothing in the program changes. Random number
generators are put back, and what the function prints is dropped. What it does to modules and outside of the process
cannot be undone.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from synk._api.plain_arguments import plain_arguments
from synk._api.plain_copy import RESIDENT, SHARED, Copy, NotComparable, copied
from synk._master.calls.callee import Callee
from synk._pure.generators import generator_states, restore_generators
from synk._pure.interrupts import safe_point
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._wire.settings import kept
from synk.backends._frameworks import Converter, host_converters
from synk.errors import ReentrancyError

MAX_S = 10.0
"""If the serial call takes longer, the function is not called in the program, where nothing could end it."""


class PlainOutputs(NamedTuple):
    """What the plain function returned.

    Attributes
    ----------
    is_run : bool
        Whether it was called. If not, ``note`` says why.
    leaves : list or None
        Its outputs, in the order of the serial ones. None if they cannot be compared with those.
    note : str
        A sentence for the report; may be empty.
    """

    is_run: bool
    leaves: list[Any] | None
    note: str

    @classmethod
    def not_run(cls, why: str) -> PlainOutputs:
        return cls(False, None, f"Not compared with the plain function: {why}.")


@dataclass(frozen=True)
class PlainCall:
    """A call of the plain function in the program.

    Attributes
    ----------
    callee : Callee
    args, kwargs, batch
        As they were passed.
    """

    callee: Callee
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any

    def why_not(self) -> str:
        """Return why it cannot mean the same in the program as on a worker; empty if it can.

        Ask after the call was made on the workers: then it is known what the function refers to.
        """
        callee = self.callee
        if callee.variables:
            return SHARED
        if callee.residents or callee.changes:
            return RESIDENT
        if callee.session is not None and callee.session.has_devices:
            return "the workers compute on devices, and the program touches none"
        return ""

    def run(self, skeleton: Any, serial_s: float) -> PlainOutputs:
        """Call the function, unless that may take too much time or memory.

        Parameters
        ----------
        skeleton
            The nesting of the serial outputs, with the position of each leaf in its place.
        serial_s : float
            How many seconds the serial call took.
        """
        if serial_s > MAX_S:
            return PlainOutputs.not_run(f"its serial call takes {serial_s:.0f} s, expected at most {MAX_S:.0f} s")
        try:
            with _unseen():
                return self._called(self._copied(), skeleton)
        except NotComparable as why:
            return PlainOutputs.not_run(str(why))

    def _copied(self) -> Copy:
        try:
            args, kwargs = plain_arguments(self.callee, self.args, self.kwargs, self.batch)
            return copied(self.callee.fn, args, kwargs)
        except Exception as error:
            if isinstance(error, NotComparable):
                raise
            text = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise NotComparable(f"it cannot be copied with its arguments ({text})") from None

    def _called(self, copy: Copy, skeleton: Any) -> PlainOutputs:
        try:
            result = safe_point(copy.fn, *copy.args, **copy.kwargs)
        except ReentrancyError:
            raise NotComparable("it uses synk.comm, which has no meaning outside of a worker") from None
        except MemoryError:
            raise NotComparable("the program has not enough memory for it") from None
        except Exception as error:
            text = f"The plain function raised {type(error).__name__}: {error}, and the serial call did not."
            return PlainOutputs(True, None, text)
        leaves: dict[int, Any] = {}
        if not _take_leaves(skeleton, copy.with_own_classes(result), leaves):
            return PlainOutputs(True, None, "The plain function returned another nesting of outputs.")
        framework = self.callee.framework
        from_framework = host_converters(framework)[1] if framework is not None else _unchanged
        return PlainOutputs(True, [_as_array(leaves[position], from_framework) for position in sorted(leaves)], "")


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Drop printed text and warnings, and put settings and random number generators back."""
    states, sink = generator_states(), io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), kept():
            warnings.simplefilter("ignore")
            yield
    finally:
        restore_generators(states)


def _take_leaves(skeleton: Any, value: Any, leaves: dict[int, Any]) -> bool:
    """Note the part of a result at the place of each leaf of ``skeleton``. Return whether it has that nesting."""
    if isinstance(skeleton, int):
        leaves[skeleton] = value
        return True
    if skeleton is None:
        return value is None
    if isinstance(skeleton, dict):
        return (
            isinstance(value, dict)
            and value.keys() == skeleton.keys()
            and all(_take_leaves(part, value[key], leaves) for key, part in skeleton.items())
        )
    return (
        isinstance(value, (tuple, list))
        and len(value) == len(skeleton)
        and all(_take_leaves(part, own, leaves) for part, own in zip(skeleton, value))
    )


def _as_array(value: Any, from_framework: Converter) -> Any:
    """Return an output in the form that a serial output has when it comes from a worker."""
    if type(value) is list:  # one object for each row
        return [_as_array(part, from_framework) for part in value]
    value = from_framework(value)
    return array_of(value.detach().cpu()) if is_tensor(value) and is_plain(value) else value


def _unchanged(value: Any) -> Any:
    return value
