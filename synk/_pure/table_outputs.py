"""Series and DataFrames as outputs: joined with their labels, or reduced if the labels are equal on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.ops import Op, Reduction
from synk._pure.partials import SliceValues
from synk._pure.tables import functions_for, is_table, kind_of, library_of, taken_rows
from synk._pure.words import text_of
from synk.errors import CollectiveMismatch


def num_rows(value: Any) -> int:
    """Return the number of rows of a table, or of the first of several slices."""
    return len(value.values[0] if isinstance(value, SliceValues) else value)


def check_table(op: Op, table: Any, what: str) -> None:
    """Raise TypeError if ``op`` has no meaning for a column of a table; ``what`` names the output."""
    if not isinstance(op, Reduction):
        return
    functions = functions_for(library_of(table))
    for label, column in zip(functions.labels_of(table), functions.columns_of(table)):
        place = _place(table, label, what)
        arrays = functions.numbers(column)
        if arrays is None:
            raise TypeError(
                f"cannot reduce {place} with op {op!r}: got dtype {column.dtype}, expected numbers. Leave the column "
                "out, or use op 'gather' or None."
            )
        op.check(arrays[0].dtype, place)


def combined(
    op: Op,
    parts: Sequence[Any],
    rows: Sequence[int],
    what: str,
    *,
    ranks: Sequence[int],
    order: np.ndarray | None = None,
) -> Any:
    """Return the tables of all ranks combined into one.

    Parameters
    ----------
    op : Op
        One that concatenates or reduces.
    parts : sequence of tables or SliceValues of them
    rows : sequence of int
        How many rows each part stands for.
    ranks : sequence of int
        The rank of each part, for errors.
    order : ndarray of int64, optional
        Row k of a gathered table goes to position ``order[k]``.

    Raises
    ------
    CollectiveMismatch
        If the tables differ in kind or columns, or tables that are reduced differ in their rows.
    """
    each = [
        (rank, table, count)
        for rank, part, num_rows in zip(ranks, parts, rows)
        for table, count in (zip(part.values, part.rows) if isinstance(part, SliceValues) else [(part, num_rows)])
    ]
    tables, weights = [table for _, table, _ in each], [count for _, _, count in each]
    verb = (op.verb or op.name) if isinstance(op, Reduction) else "gather"
    kinds = {library_of(table) for table in tables}
    functions: Any = functions_for(kinds.pop()) if len(kinds) == 1 else None
    is_reduced = isinstance(op, Reduction)
    found = [functions.differ(tables[0], table, has_rows=is_reduced) if functions else "kind" for table in tables]
    difference = next(filter(None, found), "")
    if difference:
        name = _kind if difference == "kind" else functools.partial(functions.described, difference=difference)
        texts = dict.fromkeys(f"rank {rank}: {name(table)}" for rank, table, _ in each)
        raise CollectiveMismatch(f"cannot {verb} {what}: got {'; '.join(texts)}, expected {_EXPECTED[difference]}.")
    if not isinstance(op, Reduction):
        try:
            table = functions.joined(tables)
        except Exception as error:  # other errors come from the library, in its own words
            raise CollectiveMismatch(f"cannot gather {what}: {text_of(error)}") from error
        if order is None:
            return table
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return taken_rows(table, places)
    columns = [
        _reduced(op, own, weights, functions, f"{verb} {_place(tables[0], label, what)}")
        for label, own in zip(functions.labels_of(tables[0]), zip(*map(functions.columns_of, tables)))
    ]
    return functions.with_columns(tables[0], getattr(tables[0], "index", None), columns)


_EXPECTED = {
    "kind": "one kind on all ranks. Use op None for values that differ",
    "name": "equal names on all ranks. Rename the Series in the function",
    "columns": "equal labels on all ranks. Bring the columns to one order in the function, as in result[names]",
    "dtypes": "equal dtypes on all ranks. Cast them in the function",
    "index": (
        "equal labels on all ranks. Bring the rows to one order in the function, as in result.reindex(labels, "
        'fill_value=0); use outputs="gather" if it holds one value for each row'
    ),
}


def _place(table: Any, label: Any, what: str) -> str:
    return f"column {label!r} of {what}" if hasattr(table, "columns") else what


def _kind(part: Any) -> str:
    return kind_of(part) if is_table(part) else type(part).__name__


def _reduced(op: Reduction, columns: Sequence[Any], weights: Sequence[int], functions: Any, what: str) -> Any:
    """Return the columns of all ranks reduced to one. If their dtypes differ, it has a dtype that holds all of them."""
    if any(column.dtype != columns[0].dtype for column in columns):
        dtypes = ", ".join(dict.fromkeys(str(column.dtype) for column in columns))
        columns = functions.alike(columns)
        if functions.numbers(columns[0]) is None:
            raise CollectiveMismatch(
                f"cannot {what}: got dtypes {dtypes}, expected one on all ranks. Use astype in the function."
            )
    arrays = [functions.numbers(column) for column in columns]
    values = [np.ascontiguousarray(own[0]) for own in arrays]
    out = np.empty_like(values[0])
    op.reduce_into(values, weights, out)
    masks = [own[1] for own in arrays if len(own) > 1]
    return functions.restored(columns[0], [out, np.logical_or.reduce(masks)] if masks else [out])


def compared(
    value: Any, serial: Any, are_same: Callable[[Any, Any], bool], difference: Callable[[Any, Any], float]
) -> tuple[bool, float]:
    """Return whether two outputs, at least one of them a table, are equal, and the largest difference of their numbers.

    ``are_same`` and ``difference`` compare columns of numbers.
    """
    library = library_of(value)
    functions = functions_for(library) if library and library == library_of(serial) else None
    if functions is None or functions.differ(value, serial, has_rows=True):
        return False, float("nan")
    is_equal, differences = True, []
    for a, b in zip(functions.columns_of(value), functions.columns_of(serial)):
        own, others = functions.numbers(a), functions.numbers(b)
        if own is None or others is None:
            is_equal = is_equal and functions.equals(a, b)
            continue
        has_same_mask = len(own) == len(others) and all(map(np.array_equal, own[1:], others[1:]))
        is_equal = is_equal and has_same_mask and are_same(own[0], others[0])
        differences.append(difference(own[0], others[0]))
    return is_equal, max(differences, default=float("nan"))
