"""Shows a table that changes: in a notebook, by rich in a terminal, or as plain text."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Screen(Protocol):
    """Shows one object again and again, in its state at each :meth:`show`."""

    def show(self) -> None: ...

    def close(self) -> None: ...


def screen_for(value: Any) -> Screen:
    """Return the screen for ``value``, which is shown by its ``_repr_html_`` in a notebook and else by its ``repr``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return _Cell(value)
    try:
        from rich.console import Console
    except ImportError:
        return _Lines(value)
    console = Console(stderr=True)
    return _Terminal(value, console) if console.is_terminal else _Lines(value)


class _Cell:
    """The output of a cell in a notebook."""

    def __init__(self, value: Any) -> None:
        from IPython.display import display

        self._value = value
        self._handle: Any = display(value, display_id=True)

    def show(self) -> None:
        self._handle.update(self._value)

    def close(self) -> None:
        """Do nothing: the output stays."""


class _Terminal:
    """The last lines of a terminal. Text that is printed meanwhile appears above them."""

    def __init__(self, value: Any, console: Any) -> None:
        from rich.live import Live

        self._value = value
        self._live = Live(console=console, auto_refresh=False)  # auto_refresh would start a thread
        self._live.start()

    def show(self) -> None:
        from rich.text import Text

        self._live.update(Text(repr(self._value), no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Lines:
    """A stream of text."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def show(self) -> None:
        sys.stderr.write(f"{self._value!r}\n\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Do nothing: everything is written."""
