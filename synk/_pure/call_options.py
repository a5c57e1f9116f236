"""The options of one call, as every part of a call gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class CallOptions:
    """The options of one call; see :class:`synk.Function`."""

    batch: Any = None
    num_slices: int = 1
    output_subset: tuple[Any, ...] | None = None
    timeout: float | None = None
    num_ranks: int | None = None  # among how many ranks, the first ones, the rows are divided; None for all
    is_submitted: bool = False

    @property
    def of_user(self) -> dict[str, Any]:
        """The four that a user can give, to be passed on by name."""
        return {
            "batch": self.batch,
            "num_slices": self.num_slices,
            "output_subset": self.output_subset,
            "timeout": self.timeout,
        }
