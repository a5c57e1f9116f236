"""How objects show themselves in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence


def table(title: str, rows: Sequence[Sequence[object]], *, has_heads: bool = False) -> str:
    """Return an HTML table. With ``has_heads`` the first row names the columns."""
    lines = [f"<table><caption style='text-align:left'>{html.escape(title)}</caption>"]
    for number, row in enumerate(rows):
        tag = "th" if has_heads and number == 0 else "td"
        cells = "".join(f"<{tag} style='text-align:left'>{html.escape(str(cell))}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "".join([*lines, "</table>"])


class Text(str):
    """A text of several lines that a REPL and a notebook show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"
