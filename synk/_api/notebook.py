"""Tells which cell of a notebook is running."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple


class NotebookCell(NamedTuple):
    """A cell, and one run of it.

    Attributes
    ----------
    name : str
        The notebook's own id of the cell, else the file name that stands for its text.
    run : int
    """

    name: str
    run: int

    def is_run_again(self, before: NotebookCell | None) -> bool:
        """Whether this is a later run of the same cell."""
        return before is not None and self.name == before.name and self.run != before.run


def notebook_cell(frame: FrameType) -> NotebookCell | None:
    """Return the cell if ``frame`` is at its top level, else None."""
    shell = frame.f_globals.get("get_ipython")
    if frame.f_code.co_name != "<module>" or not callable(shell) or frame.f_globals.get("__name__") != "__main__":
        return None
    shell = shell()
    run = getattr(shell, "execution_count", None)
    if not isinstance(run, int):
        return None
    parent = getattr(shell, "get_parent", None)  # the message that brought the cell, in a kernel
    message = parent() if callable(parent) else None
    name = message.get("metadata", {}).get("cellId") if isinstance(message, dict) else None
    return NotebookCell(str(name or frame.f_code.co_filename), run)
