"""How objects show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from synk._pure.environment import imported_late


def table(title: str, rows: Sequence[Sequence[object]], *, has_heads: bool = False) -> str:
    """Return an HTML table. With ``has_heads`` the first row names the columns."""
    lines = [f"<table><caption style='text-align:left'>{escaped(title)}</caption>"]
    for number, row in enumerate(rows):
        tag = "th" if has_heads and number == 0 else "td"
        cells = "".join(f"<{tag} style='text-align:left'>{escaped(str(cell))}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "".join([*lines, "</table>"])


def escaped(text: str) -> str:
    """Return a text as it must stand in HTML."""
    return str(imported_late("html").escape(text))


class Text(str):
    """A text of several lines that a REPL and a notebook show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escaped(self)}</pre>"
