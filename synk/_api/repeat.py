"""``Function.repeat``: one call of a function that runs another one again and again on its rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._api.options import is_integer
from synk._engine.rows import CallOptions
from synk._wire.apart import Again


def call_repeatedly(
    function: Any, num_repeats: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> Any:
    """Return the result of the last of so many runs. How many there are is an argument like any other."""
    if options.num_slices > 1:
        raise ValueError(
            f"cannot repeat {function.__name__!r}: got num_slices={options.num_slices}, expected 1: a run goes on from "
            "what the run before has left. Divide the rows inside the function, or call it in a loop."
        )
    again = function._renewed()._with_one_more(Again)
    return again(np.array(num_repeats), *args, **options.of_user, **kwargs)


def check_repeats(num_repeats: Any, name: str) -> int:
    if not is_integer(num_repeats, 1):
        raise ValueError(
            f"cannot repeat {name!r}: got {num_repeats!r} as the number of repetitions, expected an integer of 1 or "
            "more. It comes first: f.repeat(100, x)."
        )
    return int(num_repeats)
