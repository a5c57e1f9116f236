"""The polars half of ``synk._pure.tables``, which imports this file when it meets a polars table."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

_NUMBERS = {
    pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64, pl.Float32, pl.Float64,
    pl.Boolean,
}  # fmt: skip


def sent(rows: Any) -> Any:
    """Return what is pickled of some rows: an object whose pickle loads as the rows, which lie beside it."""
    return _Sent(rows)


class _Sent:
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __reduce__(self) -> Any:
        is_series, file = isinstance(self._rows, pl.Series), io.BytesIO()
        (self._rows.to_frame() if is_series else self._rows).write_ipc(file, compression="uncompressed")
        return _read, (pickle.PickleBuffer(file.getbuffer()), is_series)


def _read(data: Any, is_series: bool) -> Any:
    frame = pl.read_ipc(io.BytesIO(data))
    return frame.to_series() if is_series else frame


def columns_of(table: Any) -> list[Any]:
    return [table] if isinstance(table, pl.Series) else table.get_columns()


def labels_of(table: Any) -> list[Any]:
    """Return the column labels."""
    return [table.name] if isinstance(table, pl.Series) else table.columns


def numbers(column: Any) -> list[np.ndarray] | None:
    """Return the arrays of a column that an op can compute with, or None."""
    if column.dtype not in _NUMBERS:
        return None
    if not column.null_count():
        return [column.to_numpy()]
    missing = pl.Series([False] if column.dtype == pl.Boolean else [0], dtype=column.dtype)
    return [column.zip_with(column.is_not_null(), missing).to_numpy(), column.is_null().to_numpy()]


def alike(columns: Sequence[Any]) -> list[Any]:
    """Return the columns converted to a dtype that holds all of them."""
    dtype = joined(columns).dtype
    return [column.cast(dtype) for column in columns]


def restored(column: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Return a column like another from the arrays of :func:`numbers`."""
    made = pl.Series(column.name, arrays[0]).cast(column.dtype)
    if len(arrays) == 1:
        return made
    return made.zip_with(pl.Series(~arrays[1]), pl.Series([None], dtype=column.dtype))


def with_columns(template: Any, index: None, columns: Sequence[Any]) -> Any:
    """Return a table with the class and the labels of ``template``."""
    return columns[0] if isinstance(template, pl.Series) else type(template)(dict(zip(template.columns, columns)))


def joined(tables: Sequence[Any]) -> Any:
    """Return the rows of several tables, one table after the other."""
    if isinstance(tables[0], pl.Series):
        return pl.concat([table.to_frame() for table in tables], how="vertical_relaxed").to_series()
    return pl.concat(tables, how="vertical_relaxed")


def differ(first: Any, second: Any, *, has_rows: bool) -> str:
    """Return what differs between two tables, empty for nothing. Without an index, rows differ only in number."""
    if isinstance(first, pl.Series) != isinstance(second, pl.Series):
        return "kind"
    if labels_of(first) != labels_of(second):
        return "name" if isinstance(first, pl.Series) else "columns"
    dtypes = [(a.dtype, b.dtype) for a, b in zip(columns_of(first), columns_of(second))]
    if any(a != b and pl.Null not in (a, b) and not (a.is_numeric() and b.is_numeric()) for a, b in dtypes):
        return "dtypes"  # polars would convert numbers to text
    return "index" if has_rows and len(first) != len(second) else ""


def described(table: Any, difference: str) -> str:
    """Describe what differs, for errors."""
    if difference == "index":
        return f"{len(table)} rows"
    if difference == "dtypes":
        return f"dtypes {[str(column.dtype) for column in columns_of(table)]}"
    return repr(table.name) if difference == "name" else f"columns {labels_of(table)}"


def equals(first: Any, second: Any) -> bool:
    """Whether two columns that do not hold numbers are equal."""
    return bool(first.equals(second, null_equal=True))
