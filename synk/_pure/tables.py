"""Takes Series and DataFrames of pandas and polars apart into arrays with rows, and builds tables from some rows.

Columns of numbers, bools and times are arrays already. Categories travel as their codes, and columns that may have
missing values as values and masks. All other columns (text, objects, lists) are pickled in blocks of rows, and a rank
loads only the blocks that hold its rows. The table without its rows, which carries the labels, the dtypes and the name,
is part of the structure.

This file imports neither library: a program with a table has imported its own.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MODULES = {"pandas": "synk._pure.pandas_tables", "polars": "synk._pure.polars_tables"}
_BLOCK = 1 << 13
"""How many rows are pickled together."""


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


def table_parts(table: Any, dumps: Callable[[Any], bytes]) -> tuple[TableRows, list[tuple[np.ndarray, bool]]]:
    """Return an object that builds rows of a table, and the arrays that it needs.

    Parameters
    ----------
    table : Series or DataFrame
    dumps : callable
        Pickles an object.

    Returns
    -------
    make : TableRows
    parts : list of (ndarray, is_whole)
        Arrays with the rows of the table, and arrays that every rank needs whole.

    Raises
    ------
    TypeError
        If a column or the labels cannot be pickled.
    """
    library = library_of(table)
    functions = functions_for(library)
    template, columns, has_numbers = functions.opened(table)
    parts: list[tuple[np.ndarray, bool]] = []
    counts = []
    labels = functions.labels_of(table)
    # columns of the index have negative positions
    for position, column in enumerate(columns, len(labels) - len(columns)):
        arrays = functions.arrays(column)
        what = f"column {labels[position]!r}" if position >= 0 else "index"
        whole = _blocks(column, what, dumps) if arrays is None else ()
        parts += [(each, True) for each in whole] + [(each, False) for each in arrays or ()]
        counts.append(0 if arrays is None else len(arrays))
    has_numbers = has_numbers or 0 in counts
    if has_numbers:
        num_rows = len(table)
        parts.insert(0, (np.arange(num_rows, dtype=np.int32 if num_rows < 1 << 31 else np.int64), False))
    return TableRows(library, kind_of(table), _pickled(template, "labels", dumps), tuple(counts), has_numbers), parts


@dataclass(frozen=True)
class TableRows:
    """Builds a table from some rows of another one.

    Attributes
    ----------
    library : str
    what : str
        Names the table in errors.
    template : bytes
        The pickle of the table without rows.
    counts : tuple of int
        How many arrays each column has; 0 where it is pickled.
    has_numbers : bool
        Whether the first array holds the row numbers.

    Examples
    --------
    >>> import pandas
    >>> frame = pandas.DataFrame({"price": [1.5, 2.5, 3.5], "name": ["a", "b", "c"]})
    >>> make, parts = table_parts(frame, pickle.dumps)
    >>> make(*[array if is_whole else array[1:] for array, is_whole in parts])
       price name
    1    2.5    b
    2    3.5    c
    """

    library: str
    what: str
    template: bytes
    counts: tuple[int, ...]
    has_numbers: bool
    cure = ".to_numpy()"

    @functools.cached_property
    def _opened(self) -> tuple[Any, list[Any], bool]:
        opened: tuple[Any, list[Any], bool] = functions_for(self.library).opened(pickle.loads(self.template))
        return opened

    def __call__(self, *parts: np.ndarray) -> Any:
        functions, (template, columns, _), left = functions_for(self.library), self._opened, iter(parts)
        numbers = next(left) if self.has_numbers else None
        made = [
            functions.restored(column, [next(left) for _ in range(count)]) if count else _loaded(column, left, numbers)
            for column, count in zip(columns, self.counts)
        ]
        return functions.built(template, made, numbers)

    def __reduce__(self) -> Any:  # without the cached template
        return TableRows, (self.library, self.what, self.template, self.counts, self.has_numbers)


# -- columns that are pickled -----------------------------------------------------------------------------------------


def _blocks(column: Any, what: str, dumps: Callable[[Any], bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pickled blocks of a column as one array, and where each block ends."""
    pickles = [_pickled(column[start : start + _BLOCK], what, dumps) for start in range(0, len(column), _BLOCK)]
    ends = np.cumsum([len(each) for each in pickles], dtype=np.int64)
    data = b"".join(pickles)
    # Round the size up, so that columns of about the same size fit the same plan.
    room = np.zeros(1 << max(8, (len(data) - 1).bit_length()), np.uint8)
    room[: len(data)] = np.frombuffer(data, np.uint8)
    return room, ends


def _loaded(column: Any, parts: Iterator[np.ndarray], numbers: np.ndarray | None) -> Any:
    """Return the rows of a column that have these numbers. ``column`` is the column without rows."""
    data, ends = next(parts), next(parts)
    assert numbers is not None
    blocks, places = np.divmod(numbers, _BLOCK)
    wanted = np.unique(blocks)
    loaded = [pickle.loads(data[ends[block - 1] if block else 0 : ends[block]].data) for block in wanted]
    functions = functions_for("polars" if library_of(column) else "pandas")
    return functions.taken(functions.concatenated([column, *loaded]), np.searchsorted(wanted, blocks) * _BLOCK + places)


def _pickled(value: Any, what: str, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(f"its {what} cannot be pickled ({type(error).__name__}: {error})") from error


# -- rows of tables ---------------------------------------------------------------------------------------------------


def taken_rows(table: Any, positions: Sequence[int] | np.ndarray | slice) -> Any:
    """Return the rows of a table at these positions."""
    return table.iloc[positions] if library_of(table) == "pandas" else table[positions]
