"""What leaves a worker as a pickle: the user's objects, and exceptions.

Arrays on a device travel as arrays of the host: the program must not touch a device. A context there costs memory on
every GPU, and rules out ``os.fork``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import sys
import traceback
from typing import Any

from synk._pure.tensors import recipe_of_part
from synk._pure.words import TEXT_CAP, argument_hint, message_of, text_of
from synk._wire.messages import Failure
from synk._wire.parcels import TravelPickler
from synk.backends import on_host
from synk.errors import add_note


class CappedFile(io.BytesIO):
    """A file that refuses to grow beyond ``max_nbytes``, so that a huge payload is never copied."""

    def __init__(self, max_nbytes: float) -> None:
        super().__init__()
        self._max_nbytes = max_nbytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_nbytes:
            raise ValueError(f"more than {self._max_nbytes} bytes")
        return super().write(data)


class HostPickler(TravelPickler):
    """Pickles what cloudpickle does; arrays that lie on a device become NumPy's, and tensors move to the CPU."""

    has_word = True

    def reducer_override(self, obj: Any) -> Any:
        moved = on_host(obj)
        if moved is not obj:
            return moved.__reduce_ex__(5)
        return recipe_of_part(obj) or super().reducer_override(obj)


def dumps(obj: Any, max_nbytes: float = math.inf) -> bytes:
    """Return ``obj`` pickled for the program.

    Raises
    ------
    ValueError
        If the pickle is larger than ``max_nbytes``.
    """
    file = io.BytesIO() if max_nbytes == math.inf else CappedFile(max_nbytes)
    HostPickler(file, protocol=5).dump(obj)
    return file.getvalue()


_PICKLE_CAP = 1 << 20
_READ_ONLY = "is read-only"
_IS_NO_TENSOR = re.compile(
    r"must be (a )?Tensors?\b.*ndarray|expected Tensor .*ndarray|'numpy\.ndarray' object has no attribute"
)
_KEYWORD_OF_COMM = re.compile(r"\bComm\.\w+\(\) got an unexpected keyword argument '(\w+)'")
_WORKER_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _format(error: BaseException, depth: int = 0) -> str:
    """Format an exception and its chain as the interpreter does. The only method it calls of them is ``__str__``."""
    text = ""
    cause = error.__cause__
    context = None if error.__suppress_context__ else error.__context__
    if cause is not None and depth < 5:
        text = _format(cause, depth + 1) + "\nThe above exception was the direct cause of the following exception:\n\n"
    elif context is not None and depth < 5:
        text = _format(context, depth + 1) + "\nDuring handling of the above exception, another exception occurred:\n\n"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_WORKER_FOLDER + os.sep)]
    lines = traceback.StackSummary.from_list(own or frames).format()
    if len(lines) > 60:
        lines = [*lines[:30], f"  ... {len(lines) - 60} more frames ...\n", *lines[-30:]]
    text += f"Traceback (most recent call last):\n{''.join(lines)}"
    return f"{text}{type(error).__qualname__}: {message_of(error)}\n"


def _pickle(error: BaseException) -> tuple[bytes | None, str]:
    """Return the exception pickled, or None and the reason why the program cannot raise it."""
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        return None, ""
    try:
        # Its text is made. tblib, which dask's distributed installs, would pickle the traceback frame by frame.
        BaseException.with_traceback(error, None)
        data = dumps(error, _PICKLE_CAP)
        # What cannot be loaded again must fail here, not in the user's session.
        loaded = pickle.loads(data)
        return (data, "") if type(loaded) is type(error) else (None, f"it is loaded as {type(loaded).__name__}")
    except KeyboardInterrupt:
        raise
    except BaseException as inner:  # __reduce__ is the user's code and may raise anything, SystemExit included
        return None, text_of(inner)[:500]


def pack_failure(error: BaseException, rank: int, device: str, *, is_collateral: bool = False) -> Failure:
    """Return ``error`` in a form that can be sent to the program."""
    message = message_of(error)
    if isinstance(error, ValueError) and _READ_ONLY in message:
        add_note(
            error,
            "Inputs and shared variables are read-only inside a function: copy (x = x.copy()), or "
            "assign a new value (w.value = w.value + step).",
        )
    if isinstance(error, (TypeError, AttributeError)) and "torch" in sys.modules and _IS_NO_TENSOR.search(message):
        add_note(error, 'The function got NumPy arrays. Build it with framework="torch" to get tensors.')
    keyword = _KEYWORD_OF_COMM.search(message) if isinstance(error, TypeError) else None
    if keyword and (told := argument_hint("Comm", keyword[1], ())):
        add_note(error, told.strip())
    text = _format(error)[-TEXT_CAP:]
    return Failure(rank, device, type(error).__qualname__, message, text, *_pickle(error), is_collateral)
