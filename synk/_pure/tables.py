"""Rows of Series and DataFrames of pandas and polars, and of CSR matrices: cut by their own library, and packed.

The rows of a rank are a table of their own, with the labels, the dtypes and the attributes of the whole one. It is
pickled with its arrays beside the pickle, and read where it lies.

This file imports none of the libraries: a program with a table has imported its own.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.interrupts import raise_if_of_handler
from synk._pure.ranges import LINE_NBYTES, nbytes_in_place, put_in_place, round_up, taken_from_place
from synk._pure.words import text_of

_MODULES = {"pandas": "synk._pure.pandas_tables", "polars": "synk._pure.polars_tables"}
_ROUNDING = 8
"""A place for rows is at most this fraction larger than they are, so that rows of about the same size fit one plan."""


def library_of(value: Any) -> str:
    """Return the library that a Series or a DataFrame belongs to; empty for anything else."""
    for name in _MODULES:
        library = sys.modules.get(name)
        if library is not None and isinstance(
            value, (getattr(library, "DataFrame", ()), getattr(library, "Series", ()))
        ):
            return name
    return ""


def is_table(value: Any) -> bool:
    """Whether ``value`` is a Series or a DataFrame of pandas or polars."""
    return bool(library_of(value))


def kind_of(table: Any) -> str:
    """Return a table's name in errors.

    Examples
    --------
    >>> import pandas
    >>> kind_of(pandas.Series([1, 2]))
    'Series of pandas'
    """
    return f"{type(table).__name__} of {library_of(table)}"


def functions_for(library: str) -> Any:
    """Return the module with the functions for tables of this library."""
    return importlib.import_module(_MODULES[library])


def taken_rows(table: Any, positions: Sequence[int] | np.ndarray | slice) -> Any:
    """Return the rows of a table or a CSR matrix at these positions."""
    return table.iloc[positions] if library_of(table) == "pandas" else table[positions]


def pickled_rows(table: Any, positions: np.ndarray | slice, dumps: Callable[..., bytes]) -> list[Any]:
    """Return the pickle of some rows, and the buffers beside it.

    Raises
    ------
    TypeError
        If a column or the labels cannot be pickled.
    """
    rows, library = taken_rows(table, positions), library_of(table)
    buffers: list[pickle.PickleBuffer] = []
    try:
        sent = functions_for(library).sent(rows) if library else rows
        return [dumps(sent, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]
    except Exception as error:
        raise_if_of_handler(error)
        what = _culprit(rows, dumps)
        raise TypeError(f"its {what} cannot be pickled ({text_of(error)})") from error


def _culprit(table: Any, dumps: Callable[..., bytes]) -> str:
    functions = functions_for(library_of(table))
    for label, column in zip(functions.labels_of(table), functions.columns_of(table)):
        try:
            dumps(column)
        except Exception as error:
            raise_if_of_handler(error)
            return f"column {label!r}"
    return "labels"


def packed(pickles: Sequence[list[Any]]) -> np.ndarray:
    """Return the rows of all ranks in one array of bytes, shape ``(ranks, nbytes)``, as :func:`unpacked` reads them.

    Examples
    --------
    >>> [unpacked(own) for own in packed([[pickle.dumps("a")], [pickle.dumps((1, "b"))]])]
    ['a', (1, 'b')]
    """
    largest = LINE_NBYTES + max(map(nbytes_in_place, pickles))
    step = max(1 << 10, (1 << largest.bit_length()) // (2 * _ROUNDING))
    room = np.empty((len(pickles), round_up(largest, step)), np.uint8)
    for own, parts in zip(room, pickles):
        own[:8].view(np.int64)[0] = len(parts)
        put_in_place(own[LINE_NBYTES:], parts)
    return room


def unpacked(memory: np.ndarray) -> Any:
    """Load what one rank has of :func:`packed`. Its arrays are views of ``memory``."""
    count = int(memory[:8].view(np.int64)[0])
    data, *buffers = taken_from_place(memory[LINE_NBYTES:], count)
    return pickle.loads(data.data, buffers=buffers)
