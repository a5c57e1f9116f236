"""``progress=True``: a bar by tqdm, in a terminal or a notebook, and a summary at the end of a map."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from synk._engine.chunks import PoolStats
from synk._engine.jobs import is_failure


def progress_bar(name: str, length: int) -> Any:
    """Return a bar. ``length`` is 0 if the number of results is unknown.

    Raises
    ------
    ModuleNotFoundError
        If tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"cannot show the progress of {name!r}: got no module {error.name!r}, expected tqdm. Install it by "
            'pip install "synkhronos[progress]", or pass progress=False.',
            name=error.name,
        ) from None
    return tqdm(desc=name, total=length or None)


def with_progress(outcomes: Iterator[Any], bar: Any, stats: PoolStats | None = None) -> Iterator[Any]:
    """Yield the outcomes, each counted by the bar. At the end of a map, which has ``stats``, comes a summary, also if
    an exception ends it.
    """
    failed = 0
    try:
        for outcome in outcomes:
            if is_failure(outcome):
                failed += 1
                bar.set_postfix(failed=failed, refresh=False)
            bar.update()
            yield outcome
    finally:
        bar.close()
        if stats is not None:
            slowest = ", ".join(f"{number} ({seconds:.2g} s)" for seconds, number in stats.slowest)
            bar.write(
                f"{bar.desc}: {bar.n - failed} done, {failed} failed. Workers: {stats.deaths} died, {stats.replaced} "
                "replaced." + (f" Slowest items: {slowest}." if slowest else ""),
                file=sys.stderr,
            )
