"""How an exception travels from a worker to the master, and what it becomes there."""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """An exception of one rank in a form that can travel.

    Attributes
    ----------
    pickled : bytes or None
        The exception itself, if it is an ordinary ``Exception`` that can be pickled and loaded.
    unfit : str
        Why an ordinary ``Exception`` could not be pickled.
    is_collateral : bool
        Whether the rank failed only because another rank did.
    """

    rank: int
    device: str
    type_name: str
    message: str
    traceback_text: str
    pickled: bytes | None
    unfit: str = ""
    is_collateral: bool = False
