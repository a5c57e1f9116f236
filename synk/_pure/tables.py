"""Series and DataFrames of pandas and polars as arguments: taken apart into arrays with rows, and built of some rows.

Columns of numbers, bools and times are arrays as they are; so are the codes of categories, and values and masks of what
may be missing. All others (text, objects, lists) are pickled in blocks of rows, of which a rank loads those it has rows
of. What is left, a table without rows, has the labels, the dtypes and the name: it is part of the structure.

Neither library is imported from here: whoever has a table has imported its own.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from synk._pure.interrupts import safe_point

_MODULES = {"pandas": "synk._pure.pandas_tables", "polars": "synk._pure.polars_tables"}
_BLOCK = 1 << 13
"""Rows that are pickled together."""


def library_of(value: Any) -> str:
    """Return which library a Series or a DataFrame belongs to; empty for anything else."""
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
    """Return what errors call a table.

    Examples
    --------
    >>> import pandas
    >>> kind_of(pandas.Series([1, 2]))
    'Series of pandas'
    """
    return f"{type(table).__name__} of {library_of(table)}"


def functions_for(library: str) -> Any:
    """Return the module with what is done differently for tables of this library."""
    return importlib.import_module(_MODULES[library])


def table_parts(table: Any) -> tuple[TableRows, list[tuple[np.ndarray, bool]]]:
    """Return what builds rows of a table, and what it builds them from.

    Returns
    -------
    make : TableRows
    parts : list of (ndarray, is_whole)
        Arrays with the rows of the table, and those that are needed whole.

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
    for position, column in enumerate(columns, len(labels) - len(columns)):  # negative: of the index
        arrays = functions.arrays(column)
        what = f"column {labels[position]!r}" if position >= 0 else "index"
        whole = _blocks(column, what) if arrays is None else ()
        parts += [(each, True) for each in whole] + [(each, False) for each in arrays or ()]
        counts.append(0 if arrays is None else len(arrays))
    has_numbers = has_numbers or 0 in counts
    if has_numbers:
        num_rows = len(table)
        parts.insert(0, (np.arange(num_rows, dtype=np.int32 if num_rows < 1 << 31 else np.int64), False))
    return TableRows(library, kind_of(table), _dumps(template, "labels"), tuple(counts), has_numbers), parts


@dataclass(frozen=True)
class TableRows:
    """Builds a table of some of the rows of another one.

    Attributes
    ----------
    library : str
    what : str
        What errors call it.
    template : bytes
        The pickle of the table without rows.
    counts : tuple of int
        How many arrays each column has; 0 where it is pickled.
    has_numbers : bool
        Whether the first array has the numbers of the rows.

    Examples
    --------
    >>> import pandas
    >>> frame = pandas.DataFrame({"price": [1.5, 2.5, 3.5], "name": ["a", "b", "c"]})
    >>> make, parts = table_parts(frame)
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

    def __reduce__(self) -> Any:  # without what it keeps
        return TableRows, (self.library, self.what, self.template, self.counts, self.has_numbers)


# -- columns that are pickled -----------------------------------------------------------------------------------------


def _blocks(column: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the pickles of the blocks of a column, one behind the other, and where each ends."""
    pickles = [_dumps(column[start : start + _BLOCK], what) for start in range(0, len(column), _BLOCK)]
    ends = np.cumsum([len(each) for each in pickles], dtype=np.int64)
    data = b"".join(pickles)
    # So that columns of about the same size keep the plan of the call.
    room = np.zeros(1 << max(8, (len(data) - 1).bit_length()), np.uint8)
    room[: len(data)] = np.frombuffer(data, np.uint8)
    return room, ends


def _loaded(column: Any, parts: Iterator[np.ndarray], numbers: np.ndarray | None) -> Any:
    """Return the rows of a column that have these numbers; ``column`` is the one without rows."""
    data, ends = next(parts), next(parts)
    assert numbers is not None
    blocks, places = np.divmod(numbers, _BLOCK)
    wanted = np.unique(blocks)
    loaded = [pickle.loads(data[ends[block - 1] if block else 0 : ends[block]].data) for block in wanted]
    functions = functions_for("polars" if library_of(column) else "pandas")
    return functions.taken(functions.concatenated([column, *loaded]), np.searchsorted(wanted, blocks) * _BLOCK + places)


def _dumps(value: Any, what: str) -> bytes:
    try:
        try:  # two thirds of the time for what has no classes of the script's
            data = safe_point(pickle.dumps, value, protocol=5)
        except Exception:
            data = None
        return safe_point(cloudpickle.dumps, value, protocol=5) if data is None or b"__main__" in data else data
    except Exception as error:
        raise TypeError(f"its {what} cannot be pickled ({type(error).__name__}: {error})") from error


# -- rows of tables ---------------------------------------------------------------------------------------------------


def taken_rows(table: Any, positions: Sequence[int] | np.ndarray | slice) -> Any:
    """Return the rows of a table at these positions."""
    return table.iloc[positions] if library_of(table) == "pandas" else table[positions]
