"""How an exception travels from a worker to the master, and what it becomes there."""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """An exception of one rank in transferable form.

    Attributes
    ----------
    pickled : bytes or None
        The exception itself where it can be pickled, loaded again and is an ordinary ``Exception``.
    unfit : str
        Why it could not be, where it is one.
    is_collateral : bool
        The rank failed only because another one did.
    """

    rank: int
    device: str
    type_name: str
    message: str
    traceback_text: str
    pickled: bytes | None
    unfit: str = ""
    is_collateral: bool = False
