"""The pandas half of ``synk._pure.tables``, which imports this file when it meets a pandas table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

_MASKED = (pd.arrays.IntegerArray, pd.arrays.FloatingArray, pd.arrays.BooleanArray)


def sent(rows: Any) -> Any:
    """Return what is pickled of some rows: contiguous arrays, or the pickle would hold them, or all of their rows."""
    return rows.copy()


def columns_of(table: Any) -> list[Any]:
    """Return the columns of a table, without the index."""
    return [_column(table)] if isinstance(table, pd.Series) else [_column(column) for _, column in table.items()]


def _column(values: Any) -> Any:
    """Return the array behind a Series or an index: a NumPy array if NumPy has the dtype."""
    return values.to_numpy() if isinstance(values.dtype, np.dtype) else values.array


def labels_of(table: Any) -> list[Any]:
    """Return the column labels."""
    return [table.name] if isinstance(table, pd.Series) else list(table.columns)


def numbers(column: Any) -> list[np.ndarray] | None:
    """Return the arrays of a column that an op can compute with, or None."""
    if isinstance(column, _MASKED):
        dtype = column.dtype
        return [column.to_numpy(dtype.numpy_dtype, na_value=dtype.type(0)), column.isna()]
    return [column] if isinstance(column, np.ndarray) and column.dtype.kind in "biufc" else None


def alike(columns: Sequence[Any]) -> list[Any]:
    """Return the columns converted to a dtype that holds all of them."""
    dtype = pd.concat([pd.Series(column, dtype=column.dtype) for column in columns]).dtype
    return [column.astype(dtype) for column in columns]


def restored(column: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Return a column like another from the arrays of :func:`numbers`."""
    return type(column)(*arrays) if isinstance(column, _MASKED) else arrays[0]


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
