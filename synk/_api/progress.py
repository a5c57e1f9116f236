"""A progress bar around an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from synk._pure.interrupts import deferred


def with_progress(results: Iterator[Any], name: str, length: int) -> Iterator[Any]:
    """Return an iterator over the same results that shows how many there were; ``length`` 0: of an unknown number.

    Raises
    ------
    ModuleNotFoundError
        Where tqdm is not installed.
    """
    try:
        with deferred():  # an import that is broken off leaves half a module
            from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"cannot show the progress of {name!r}: got no module {error.name!r}, expected tqdm. Install it by "
            'pip install "synkhronos[progress]", or pass progress=False.',
            name=error.name,
        ) from None
    return iter(tqdm(results, desc=name, total=length or None))
