"""The pandas half of ``synk._pure.tables``, which imports this file when it meets a pandas table."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

_MASKED = (pd.arrays.IntegerArray, pd.arrays.FloatingArray, pd.arrays.BooleanArray)


def opened(table: Any) -> tuple[Any, list[Any], bool]:
    """Return a table without rows, its columns (those of the index first), and whether the index just counts rows."""
    index = table.index
    own: list[Any] = []
    if isinstance(index, pd.MultiIndex):
        own = [np.asarray(codes) for codes in index.codes]
    elif not isinstance(index, pd.RangeIndex):
        own = [_column(index)]
    return table.iloc[:0], own + columns_of(table), isinstance(index, pd.RangeIndex)


def columns_of(table: Any) -> list[Any]:
    """Return the columns of a table, without the index."""
    return [_column(table)] if isinstance(table, pd.Series) else [_column(column) for _, column in table.items()]


def _column(values: Any) -> Any:
    """Return the array behind a Series or an index: a NumPy array if NumPy has the dtype."""
    return values.to_numpy() if isinstance(values.dtype, np.dtype) else values.array


def labels_of(table: Any) -> list[Any]:
    """Return the column labels."""
    return [table.name] if isinstance(table, pd.Series) else list(table.columns)


def arrays(column: Any) -> list[np.ndarray] | None:
    """Return the arrays that hold a column, or None if it must be pickled."""
    dtype = column.dtype
    if isinstance(column, _MASKED):
        return [column.to_numpy(dtype.numpy_dtype, na_value=dtype.type(0)), column.isna()]
    if isinstance(dtype, pd.CategoricalDtype):
        return [column.codes]
    if isinstance(dtype, (pd.DatetimeTZDtype, pd.PeriodDtype)):
        return [column.view("i8")]
    return [column] if isinstance(column, np.ndarray) and not dtype.hasobject else None


def numbers(column: Any) -> list[np.ndarray] | None:
    """Return the arrays of a column that an op can compute with, or None."""
    is_plain = isinstance(column, np.ndarray) and column.dtype.kind in "biufc"
    return arrays(column) if is_plain or isinstance(column, _MASKED) else None


def alike(columns: Sequence[Any]) -> list[Any]:
    """Return the columns converted to a dtype that holds all of them."""
    dtype = concatenated(columns).dtype
    return [column.astype(dtype) for column in columns]


def restored(column: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Return a column built from its arrays. ``column`` gives the dtype and may have no rows."""
    dtype = column.dtype
    if isinstance(column, _MASKED):
        return type(column)(*arrays)
    if isinstance(dtype, pd.CategoricalDtype):
        return pd.Categorical.from_codes(arrays[0], dtype=dtype)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return pd.DatetimeIndex(arrays[0].view(f"M8[{dtype.unit}]")).tz_localize("UTC").tz_convert(dtype.tz).array
    if isinstance(dtype, pd.PeriodDtype):
        return pd.PeriodIndex.from_ordinals(arrays[0], freq=dtype.freq).array
    return arrays[0]


def concatenated(columns: Sequence[Any]) -> Any:
    """Join columns of one dtype."""
    return _column(pd.concat([pd.Series(column, dtype=column.dtype) for column in columns], ignore_index=True))


def taken(column: Any, positions: np.ndarray) -> Any:
    return column.take(positions)


def built(template: Any, columns: Sequence[Any], numbers: np.ndarray | None) -> Any:
    """Return a table like ``template``, with columns in the order of ``opened`` and the rows of these numbers."""
    index = template.index
    if isinstance(index, pd.RangeIndex):
        assert numbers is not None
        return with_columns(template, _counting(index, numbers), columns)
    if isinstance(index, pd.MultiIndex):
        codes = columns[: index.nlevels]
        own = pd.MultiIndex(index.levels, codes, names=index.names, verify_integrity=False)
        return with_columns(template, own, columns[index.nlevels :])
    own = pd.Index(columns[0], dtype=index.dtype, name=index.name, copy=False)
    if getattr(index, "freq", None) is not None and not isinstance(index, pd.PeriodIndex):
        with contextlib.suppress(ValueError):  # the rows are not evenly spaced
            own.freq = index.freq
    return with_columns(template, own, columns[1:])


def with_columns(template: Any, index: Any, columns: Sequence[Any]) -> Any:
    """Return a table with the class, the labels and the attributes of ``template``, and these rows."""
    if isinstance(template, pd.Series):
        table: Any = pd.Series(columns[0], index, dtype=columns[0].dtype, name=template.name, copy=False)
    else:
        own = {  # Without a dtype pandas would convert objects that are text to its text dtype.
            k: pd.Series(column, index, dtype=object) if column.dtype == object else column
            for k, column in enumerate(columns)
        }
        table = pd.DataFrame(own, index, copy=False)
        table.columns = template.columns
    if type(table) is not type(template):
        table = template._constructor(table)
    return table.__finalize__(template)


def _counting(index: Any, numbers: np.ndarray) -> Any:
    """Return the part of a counting index at ``numbers``. It counts too if the numbers are evenly spaced."""
    if not len(numbers):
        return index
    first = int(numbers[0])
    step = int(numbers[1]) - first if len(numbers) > 1 else 1
    if step and np.array_equal(numbers, np.arange(first, first + step * len(numbers), step)):
        start, step = index.start + index.step * first, index.step * step
        return pd.RangeIndex(start, start + step * len(numbers), step, name=index.name)
    return pd.Index(index.start + index.step * numbers.astype(np.int64), name=index.name)


def joined(tables: Sequence[Any]) -> Any:
    """Return the rows of several tables, one table after the other."""
    table, dtype = pd.concat(tables), tables[0].index.dtype
    if table.index.dtype != dtype and all(each.index.dtype == dtype for each in tables):
        table.index = table.index.astype(dtype)  # pandas converts objects that are text to its text dtype
    return table


def differ(first: Any, second: Any, *, has_rows: bool) -> str:
    """Return which labels of two tables differ, empty for none. With ``has_rows`` the index is compared too."""
    if isinstance(first, pd.Series) != isinstance(second, pd.Series):
        return "kind"
    if not pd.Index(labels_of(first)).equals(pd.Index(labels_of(second))):
        return "name" if isinstance(first, pd.Series) else "columns"
    return "index" if has_rows and not first.index.equals(second.index) else ""


def described(table: Any, difference: str) -> str:
    """Describe the labels that differ, for errors."""
    if difference == "index":
        index = table.index
        more = ", ..." if len(index) > 6 else ""
        return f"index [{', '.join(map(repr, index[:6].tolist()))}{more}] of {len(index)}"
    return repr(table.name) if difference == "name" else f"columns {labels_of(table)}"


def equals(first: Any, second: Any) -> bool:
    """Whether two columns that do not hold numbers are equal."""
    return bool(pd.Series(first, dtype=first.dtype).equals(pd.Series(second, dtype=second.dtype)))
