"""What a line of the check has found: figures beside what is expected, and whether it is ok, slow or broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, SLOW, BROKEN, SKIPPED = "ok", "slow", "broken", "skipped"


class Broken(Exception):
    """Says in a sentence what does not work."""


@dataclass(frozen=True)
class Figure:
    """A number that was measured, beside the worst one that is still as expected."""

    name: str
    value: float
    unit: str
    expected: float
    is_more_better: bool = False

    @property
    def is_as_expected(self) -> bool:
        return self.value >= self.expected if self.is_more_better else self.value <= self.expected

    def __str__(self) -> str:
        bound = "at least" if self.is_more_better else "at most"
        return f"{self.name} {self.value:.3g} {self.unit} (expected {bound} {self.expected:.3g})"


@dataclass(frozen=True)
class Found:
    """The answer of one line.

    Attributes
    ----------
    text : str
        A sentence about what was seen.
    figures : tuple of Figure
    slow : str
        Why it is slow although no figure says so; empty if it is not.
    facts : mapping
        What a bug report needs besides.
    """

    text: str
    figures: tuple[Figure, ...] = ()
    slow: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        return SLOW if self.slow or any(not each.is_as_expected for each in self.figures) else OK

    def record(self) -> dict[str, Any]:
        """Return the answer as values for JSON."""
        sentences = [self.text, self.slow, *(str(each) for each in self.figures)]
        text = "; ".join(sentence for sentence in sentences if sentence)
        figures = [asdict(each) for each in self.figures]
        return {"outcome": self.outcome, "text": text, "figures": figures, "facts": dict(self.facts)}


def without_figures(outcome: str, text: str) -> dict[str, Any]:
    """Return the record of a line that has measured nothing."""
    return {"outcome": outcome, "text": text, "figures": [], "facts": {}}
