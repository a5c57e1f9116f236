"""The pictures of these pages, drawn as SVG for a light and a dark page: ``python docs/pictures.py FOLDER``.

Sphinx calls :func:`draw_all` when it builds the pages; nothing that is drawn here is kept in the repository.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("measured.json")

THEMES = {
    "light": {
        "ink": "#1f2328", "faint": "#6e7781", "line": "#8c959f", "paper": "#f6f8fa",
        "a": "#4477aa", "b": "#ee8866", "c": "#44aa77", "tint a": "#d6e3f0", "tint b": "#fbe2d9", "tint c": "#d7efe3",
    },
    "dark": {
        "ink": "#e6edf3", "faint": "#9da7b1", "line": "#6e7681", "paper": "#22272e",
        "a": "#77aadd", "b": "#ffaa88", "c": "#77ccaa", "tint a": "#22374d", "tint b": "#4d3328", "tint c": "#23443a",
    },
}  # fmt: skip


class Picture:
    """A drawing of boxes, arrows and words. Lengths are in pixels, from the left and the top."""

    def __init__(self, width: int, height: int, title: str, colours: dict[str, str]) -> None:
        self._colours = colours
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="13"><title>{html.escape(title)}</title>'
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str = "paper", edge: str = "line") -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{self._colours[fill]}" '
            f'stroke="{self._colours[edge]}"/>'
        )

    def text(self, x: float, y: float, words: str, *, at: str = "middle", ink: str = "ink", size: int = 13) -> None:
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{at}" fill="{self._colours[ink]}" font-size="{size}">'
            f"{html.escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str = "line", *, is_dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="4 4"' if is_dashed else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{self._colours[ink]}" stroke-width="1.5"{dashes}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, ink: str = "line") -> None:
        self.line(x1, y1, x2, y2, ink)
        angle = math.atan2(y2 - y1, x2 - x1)
        ends = [(x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *ends])
        self._parts.append(f'<polygon points="{points}" fill="{self._colours[ink]}"/>')

    def curve(self, points: Sequence[tuple[float, float]], ink: str) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{joined}" fill="none" stroke="{self._colours[ink]}" stroke-width="2"/>')
        for x, y in points:
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{self._colours[ink]}"/>')

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self._parts, "</svg>\n"]), encoding="utf-8")


def one_call(colours: dict[str, str]) -> Picture:
    """Scatter, compute, reduce."""
    picture = Picture(640, 240, "One call: rows are scattered, workers compute, results are combined", colours)
    for x, words in ((70, "your program"), (330, "the workers"), (580, "your program")):
        picture.text(x, 20, words, ink="faint")
    picture.text(70, 50, "x: 7 rows")
    for row in range(7):
        ink = "abc"[0 if row < 3 else 1 if row < 5 else 2]
        picture.box(30, 60 + 16 * row, 80, 16, f"tint {ink}", ink)
    picture.box(45, 195, 50, 26)
    picture.text(70, 213, "w")
    for rank, (ink, rows) in enumerate((("a", 3), ("b", 2), ("c", 2))):
        y = 45 + 65 * rank
        picture.arrow(114, (84, 124, 156)[rank], 242, y + 18, ink)
        picture.arrow(99, 208, 242, y + 34)
        picture.box(246, y, 168, 48, f"tint {ink}", ink)
        picture.text(330, y + 20, f"rank {rank}: f(w, x[{rows} rows])")
        picture.text(330, y + 38, f"mean of {rows} rows", ink="faint")
        picture.arrow(418, y + 24, 528, 134, ink)
    picture.box(532, 110, 96, 48)
    picture.text(580, 131, "mean of")
    picture.text(580, 148, "all 7 rows")
    picture.text(545, 215, "avg: (3a + 2b + 2c) / 7", ink="faint")
    return picture


def where_data_live(colours: dict[str, str]) -> Picture:
    """Plain arrays, Data, Shared."""
    picture = Picture(640, 270, "Where data live: plain arrays, Data, shared variables", colours)
    for x, words in ((105, "your program"), (320, "shared memory"), (535, "the workers")):
        picture.text(x, 20, words, ink="faint")
    picture.line(212, 30, 212, 262, is_dashed=True)
    picture.line(428, 30, 428, 262, is_dashed=True)
    rows = (
        ("a", "a plain array", "copied at every call", "read in place"),
        ("b", "synk.data(x)", "copied once", "read in place"),
        ("c", "synk.shared(w)", "a copy on demand: w.value", "read and assigned by every rank"),
    )
    for number, (ink, name, how, use) in enumerate(rows):
        y = 40 + 78 * number
        if ink == "a":
            picture.box(40, y, 130, 34, "tint a", "a")
        picture.text(105, y + 22, name)
        picture.text(105, y + 54, how, ink="faint", size=12)
        picture.box(255, y, 130, 34, f"tint {ink}", ink)
        picture.text(320, y + 22, ("x", "x", "w")[number])
        picture.arrow(385, y + 17, 462, y + 17, ink)
        if ink == "a":
            picture.arrow(172, y + 17, 251, y + 17, ink)
        elif ink == "b":
            picture.line(172, y + 17, 251, y + 17, ink, is_dashed=True)
        else:
            picture.arrow(462, y + 24, 389, y + 24, ink)
        picture.box(466, y, 138, 34)
        picture.text(535, y + 22, "rank 0, 1, ...")
        picture.text(535, y + 54, use, ink="faint", size=12)
    return picture


def three_calls(colours: dict[str, str]) -> Picture:
    """Three calls on a line of time, waited for and submitted."""
    picture = Picture(640, 250, "Three calls, waited for and submitted", colours)
    for top, title, starts in ((20, "waited for: f(x)", (0, 170, 340)), (140, "submitted: f.submit(x)", (0, 120, 240))):
        picture.text(10, top, title, at="start", ink="faint")
        for lane, name in enumerate(("program", "rank 0", "rank 1")):
            y = top + 10 + 28 * lane
            picture.text(10, y + 17, name, at="start")
            for number, start in enumerate(starts):
                ink = "abc"[number]
                if lane == 0:
                    begin = 90 + start if top == 20 else 90 + 50 * number
                    picture.box(begin, y, 46, 22, f"tint {ink}", ink)
                    picture.text(begin + 23, y + 16, f"prep. {number + 1}", size=11)
                else:
                    length = (112, 104)[(lane + number) % 2]
                    picture.box(140 + start, y, length, 22, ink, ink)
                    picture.text(140 + start + length / 2, y + 16, f"call {number + 1}", ink="paper", size=11)
    picture.arrow(90, 240, 630, 240)
    picture.text(630, 234, "time", at="end", ink="faint", size=11)
    return picture


def overheads(colours: dict[str, str]) -> Picture:
    """What a call costs beyond its function, against peers."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    bars = measured["overhead_us"]
    picture = Picture(640, 60 + 30 * len(bars), "Overhead of a small call, in microseconds, by runtime", colours)
    picture.text(10, 20, "overhead of a small call on 2 workers, microseconds (logarithmic)", at="start", ink="faint")
    low, high = 10.0, 30_000.0
    for number, (name, value) in enumerate(sorted(bars.items(), key=lambda item: item[1])):
        y = 34 + 30 * number
        length = 340 * math.log(max(value, low * 1.05) / low) / math.log(high / low)
        ink = "b" if name == "synk" else "a"
        picture.text(178, y + 16, name, at="end")
        picture.box(186, y, length, 22, f"tint {ink}", ink)
        picture.text(194 + length, y + 16, f"{value:,.0f}", at="start", ink="faint")
    picture.text(10, 50 + 30 * len(bars), f"measured {measured['when']} on {measured['machine']}", at="start",
                 ink="faint", size=11)  # fmt: skip
    return picture


def speed_ups(colours: dict[str, str]) -> Picture:
    """How much faster two workers are, by the length of the serial call."""
    overhead_s = json.loads(RESULTS.read_text(encoding="utf-8"))["overhead_us"]["synk"] * 1e-6
    picture = Picture(640, 290, "Speed-up of 2, 4 and 8 workers over the length of the serial call", colours)
    picture.text(10, 20, "speed-up by the length of the serial call: work divided evenly, plus the measured overhead",
                 at="start", ink="faint")  # fmt: skip
    left, bottom, width, height = 60.0, 250.0, 500.0, 210.0
    seconds = [10 ** (-4 + k / 4) for k in range(13)]
    picture.arrow(left, bottom, left + width + 20, bottom)
    picture.arrow(left, bottom, left, bottom - height - 10)
    for exponent, words in ((-4, "0.1 ms"), (-3, "1 ms"), (-2, "10 ms"), (-1, "100 ms")):
        picture.text(left + width * (exponent + 4) / 3, bottom + 20, words, ink="faint", size=11)
    for speed_up in (1, 2, 4, 8):
        y = bottom - height * speed_up / 8
        picture.line(left, y, left + width, y, is_dashed=True)
        picture.text(left - 8, y + 4, str(speed_up), at="end", ink="faint", size=11)
    for workers, ink in ((2, "a"), (4, "b"), (8, "c")):
        points = [
            (left + width * (math.log10(each) + 4) / 3, bottom - height * (each / (each / workers + overhead_s)) / 8)
            for each in seconds
        ]
        picture.curve(points, ink)
        picture.text(left + width + 8, points[-1][1] + 4, f"{workers} workers", at="start", ink=ink, size=12)
    return picture


PICTURES = {
    "one_call": one_call,
    "where_data_live": where_data_live,
    "three_calls": three_calls,
    "overheads": overheads,
    "speed_ups": speed_ups,
}


def draw_all(folder: Path) -> None:
    """Draw every picture in both themes, as ``NAME-light.svg`` and ``NAME-dark.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        for theme, colours in THEMES.items():
            draw(colours).save(folder / f"{name}-{theme}.svg")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
