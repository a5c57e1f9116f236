"""The module-level verbs that only pass on to the current runtime."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from synk.data import Data
from synk.runtime import current, has_current


def data(
    value: Any = None,
    *,
    dtype: npt.DTypeLike | None = None,
    shape: Sequence[int] | int | None = None,
    ndim: int | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1.0,
    name: str | None = None,
) -> Data:
    """Make an array in shared memory; see :class:`synk.Data`.

    Parameters
    ----------
    value : array-like, shape (rows, *rest), optional
        Copied in. Without it the contents are zeros.
    dtype, shape, ndim
        Of the array; needed where there is no value (dtype, and one of the others).
    minibatch : bool
        The object will hold only the rows of the current batch.
    force_cast : bool
        Allow a cast of ``value`` to ``dtype`` that can lose information.
    oversize : float
        Memory to take, as a factor of 1.0 to 2.0, so that it can grow in place.
    name : str, optional
        For errors.

    Returns
    -------
    Data

    Raises
    ------
    TypeError
        For objects, masked arrays, ragged lists, and casts that lose information.
    SharedMemoryError
        If the memory does not suffice.
    NotForkedError, ClosedError

    Examples
    --------
    >>> import synk
    >>> with synk.fork(2):
    ...     x = synk.data([[1.0, 2.0], [3.0, 4.0]])
    ...     x[0] = 5.0
    ...     x.data.sum()
    np.float64(17.0)
    """
    return current().data(
        value,
        dtype=dtype,
        shape=shape,
        ndim=ndim,
        minibatch=minibatch,
        force_cast=force_cast,
        oversize=oversize,
        name=name,
    )


def info() -> str:
    """Return a description of synk, this machine, and the current runtime."""
    import synk

    lines = [
        f"synk {synk.__version__}, Python {platform.python_version()}, numpy {np.__version__}, {platform.platform()}",
        f"CPU: {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable",
    ]
    if has_current():
        lines.append(current().info())
    else:
        lines.append("runtime: none (synk.fork() starts one)")
    return "\n".join(lines)
