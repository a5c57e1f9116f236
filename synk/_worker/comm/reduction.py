"""Reductions for a communicator that lacks an op, a dtype or NumPy's rule for NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk.communicators import Capabilities

# The dtypes that NCCL lacks, or in which it would round too much, and the dtypes in which they are reduced instead.
WIDENED = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "uint16": "uint32"}


@dataclass
class _Part:
    """An array that the communicator can reduce as it is, because it has the op for the dtype."""

    array: Any
    op: str
    weight: float | None


class SplitReduction:
    """One reduction, split into parts that the communicator can do. The reduced parts make the result."""

    def __init__(self, xp: Any, array: Any, op: str, weight: float | None, capabilities: Capabilities) -> None:
        self._xp = xp
        self._dtype = array.dtype
        is_exact = capabilities.nan_propagates
        if not is_exact and array.dtype.name in WIDENED:
            array = array.astype(WIDENED[array.dtype.name])
        if op == "avg" and weight is not None and not capabilities.has_weighted_avg:
            array, op, weight = array * array.dtype.type(weight), "sum", None
        self.parts = [_Part(array, op, weight)]
        if not is_exact and op in ("min", "max") and array.dtype.kind == "f":
            self.parts.append(_Part(xp.isnan(array).astype(np.uint8), "max", None))

    def result(self, reduced: Sequence[Any]) -> Any:
        array = reduced[0]
        if len(reduced) > 1:
            array = self._xp.where(reduced[1].astype(bool), array.dtype.type(np.nan), array)
        return array.astype(self._dtype, copy=False)
