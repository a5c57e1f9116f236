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
TRACED = Path(__file__).with_name("traced.json")

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
        for point in points:
            self.dot(point, ink)

    def dot(self, point: tuple[float, float], ink: str) -> None:
        x, y = point
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{self._colours[ink]}"/>')

    def behind(self, fill: str) -> None:
        """Fill the background."""
        self._parts.insert(1, f'<rect width="100%" height="100%" fill="{self._colours[fill]}"/>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])

    def save(self, path: Path) -> None:
        path.write_text(self.svg(), encoding="utf-8")


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
    picture.text(10, 50 + 30 * len(bars), f"measured {measured['overhead_measured']}", at="start",
                 ink="faint", size=11)  # fmt: skip
    return picture


TIMES = {1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "0.1 ms", 1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "0.1 s", 1.0: "1 s"}


def speed_ups(colours: dict[str, str]) -> Picture:
    """Speed-ups of two workers by the length of the serial call: measured points, and the ideal."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    picture = Picture(640, 300, "Speed-up of two workers by the length of the serial call, measured", colours)
    picture.text(10, 20, "speed-up of two workers on two cores", at="start")
    left, bottom, width, height = 60.0, 240.0, 500.0, 190.0
    lengths = [each["serial_s"] for each in measured["speed_ups"]]
    first, last = math.floor(math.log10(min(lengths))), math.ceil(math.log10(max(lengths)))

    def place(seconds: float, speed_up: float) -> tuple[float, float]:
        across = (math.log10(seconds) - first) / (last - first)
        return left + width * across, bottom - height * speed_up / 2

    for speed_up, words in ((0, "0"), (1, "1"), (2, "2")):
        _, y = place(1.0, speed_up)
        picture.line(left, y, left + width, y, is_dashed=speed_up > 0)
        picture.text(left - 8, y + 4, words, at="end", ink="faint", size=11)
    picture.text(left + width + 6, place(1.0, 2)[1] + 4, "ideal", at="start", ink="faint", size=11)
    for seconds, words in TIMES.items():
        picture.text(place(seconds, 0)[0], bottom + 18, words, ink="faint", size=11)
    picture.text(left + width / 2, bottom + 36, "length of the serial call", ink="faint", size=11)
    for number, (key, words, ink) in enumerate((("data", "synk.data", "a"), ("plain", "plain array", "b"))):
        for each in measured["speed_ups"]:
            picture.dot(place(each["serial_s"], each[key]), ink)
        picture.dot((left + 260 + 110 * number, 16), ink)
        picture.text(left + 270 + 110 * number, 20, words, at="start", ink="faint", size=12)
    picture.text(10, 294, f"measured {measured['speed_ups_measured']}", at="start", ink="faint", size=11)
    return picture


BYTES = {4 << 10: "4 KB", 64 << 10: "64 KB", 1 << 20: "1 MB", 16 << 20: "16 MB", 64 << 20: "64 MB"}


def chart(
    colours: dict[str, str],
    title: str,
    curves: dict[str, dict[float, float]],
    at_x: dict[float, str],
    measured: str,
) -> Picture:
    """Draw curves of seconds, both axes logarithmic; ``at_x`` are the words below the horizontal axis."""
    picture = Picture(640, 320, title, colours)
    picture.text(10, 20, title, at="start", ink="faint")
    left, bottom, width, height = 60.0, 260.0, 450.0, 215.0
    seconds = [each for curve in curves.values() for each in curve.values()]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    first, last = math.log10(min(at_x)), math.log10(max(at_x))

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + 15 + (width - 15) * (math.log10(x) - first) / (last - first)
        return across, bottom - height * (math.log10(y) - low) / (high - low)

    picture.arrow(left, bottom, left + width + 20, bottom)
    picture.arrow(left, bottom, left, bottom - height - 10)
    for x, words in at_x.items():
        picture.text(place(x, 1.0)[0], bottom + 20, words, ink="faint", size=11)
    for y, words in TIMES.items():
        if low <= math.log10(y) <= high:
            up = place(min(at_x), y)[1]
            picture.line(left, up, left + width, up, is_dashed=True)
            picture.text(left - 8, up + 4, words, at="end", ink="faint", size=11)
    names = []
    for (name, curve), ink in zip(curves.items(), ("faint", "a", "b", "c"), strict=False):
        points = [place(x, y) for x, y in curve.items()]
        picture.curve(points, ink)
        names.append((points[-1][1], name, ink))
    below = -math.inf
    for up, name, ink in sorted(names):  # names of curves that end together stand below each other
        below = max(up, below + 15)
        picture.text(left + width + 10, below + 4, name, at="start", ink=ink, size=12)
    picture.text(10, 308, f"measured {measured}", at="start", ink="faint", size=11)
    return picture


def _curve(found: dict[str, float], least: float = 0.0) -> dict[float, float]:
    return {float(x): y for x, y in found.items() if float(x) >= least}


def copies(colours: dict[str, str]) -> Picture:
    """What an argument and a result cost, by their size."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = measured["copies"]
    curves = {
        "one copy by NumPy": _curve(found["one copy"]),
        "synk.data": _curve(found["synk.data"]),
        "plain array": _curve(found["plain array"]),
        "result": _curve(found["result"]),
    }
    title = "a call with an argument or a result of this size, 2 workers"
    return chart(colours, title, curves, {float(nbytes): words for nbytes, words in BYTES.items()},
                 measured["costs_measured"])  # fmt: skip


def number_of_workers(colours: dict[str, str]) -> Picture:
    """What a tiny call costs, by the number of workers."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    curve = _curve(measured["workers"])
    return chart(colours, "a tiny call, by the number of workers", {"": curve}, {x: f"{x:.0f}" for x in curve},
                 measured["costs_measured"])  # fmt: skip


def sums(colours: dict[str, str]) -> Picture:
    """What a sum over the ranks costs inside a function, by its size, and MPI's."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    curves = {
        f"{name} all_reduce" if name == "synk" else name: _curve(found) for name, found in measured["sums"].items()
    }
    title = "synk.comm.all_reduce of an array of this size, 2 ranks"
    words = {8.0: "8 B"} | {float(nbytes): each for nbytes, each in BYTES.items() if nbytes != 4 << 10}
    return chart(colours, title, curves, words, measured["sums_measured"])


def a_step(colours: dict[str, str]) -> Picture:
    """A step of training: replicas, rows, gradients."""
    picture = Picture(640, 220, "A step of training: each worker has a copy, gradients are those of all rows", colours)
    for x, words in ((75, "a batch"), (215, "forward, backward"), (400, "gradients"), (545, "optimizer.step()")):
        picture.text(x, 20, words, ink="faint")
    for rank, ink in enumerate("abc"):
        y = 36 + 58 * rank
        picture.box(30, y, 90, 40, f"tint {ink}", ink)
        picture.text(75, y + 25, f"rows of rank {rank}", size=11)
        picture.arrow(122, y + 20, 146, y + 20, ink)
        picture.box(150, y, 130, 40, f"tint {ink}", ink)
        picture.text(215, y + 25, f"copy {rank} of the model", size=11)
        picture.arrow(282, y + 20, 346, 114, ink)
        picture.arrow(452, 114, 478, y + 20)
        picture.box(482, y, 130, 40, f"tint {ink}", ink)
        picture.text(547, y + 25, "the same step", size=11)
    picture.box(350, 90, 100, 48)
    picture.text(400, 111, "mean over")
    picture.text(400, 128, "all rows")
    return picture


def ranks_talk(colours: dict[str, str]) -> Picture:
    """What a collective does, and what a message does."""
    picture = Picture(640, 210, "A collective among all ranks, and a message from one to another", colours)
    picture.text(150, 20, 'comm.all_reduce(a, "sum")', ink="faint")
    picture.text(490, 20, "comm.send(a, 2) and comm.recv(0)", ink="faint")
    for rank, ink in enumerate("abc"):
        y = 40 + 56 * rank
        picture.box(20, y, 70, 36, f"tint {ink}", ink)
        picture.text(55, y + 23, f"rank {rank}: {rank + 1}")
        picture.arrow(92, y + 18, 126, 114, ink)
        picture.arrow(174, 114, 206, y + 18)
        picture.box(210, y, 70, 36, f"tint {ink}", ink)
        picture.text(245, y + 23, f"rank {rank}: 6")
        picture.box(400, y, 70, 36, f"tint {ink}", ink)
        picture.text(435, y + 23, f"rank {rank}")
        picture.box(540, y, 70, 36, f"tint {ink}", ink)
        picture.text(575, y + 23, f"rank {rank}: a" if rank in (0, 2) else f"rank {rank}")
        picture.line(472, y + 18, 536, y + 18, is_dashed=True)
    picture.box(130, 96, 40, 36)
    picture.text(150, 119, "sum")
    picture.arrow(472, 64, 536, 164, "a")
    return picture


def who_runs_what(colours: dict[str, str]) -> Picture:
    """The processes, what each holds, and what goes between them."""
    picture = Picture(640, 230, "The program, its workers, and what goes between them", colours)
    picture.box(20, 60, 150, 110)
    for line, words in enumerate(("your program", "functions, Data,", "names of variables")):
        picture.text(95, 95 + 24 * line, words, ink="ink" if line == 0 else "faint", size=13 if line == 0 else 12)
    picture.box(255, 20, 130, 44, "tint a", "a")
    picture.text(320, 47, "shared memory")
    picture.arrow(172, 82, 251, 48, "a")
    for rank, (ink, y) in enumerate((("b", 40), ("c", 140))):
        picture.box(470, y, 150, 70, f"tint {ink}", ink)
        picture.text(545, y + 28, f"worker of rank {rank}")
        picture.text(545, y + 50, "device, replicas, state", ink="faint", size=12)
        picture.arrow(387, 48, 466, y + 22, "a")
        picture.arrow(172, (125, 145)[rank], 466, y + 50)
    picture.text(300, 90, "array bytes", ink="a", size=12)
    picture.text(290, 212, "pipes: eight bytes a call down, eight up", ink="faint", size=12)
    picture.text(545, 128, "messages of synk.comm", ink="faint", size=11)
    return picture


def after_a_death(colours: dict[str, str]) -> Picture:
    """A worker dies, the call raises, the next one has a new worker."""
    picture = Picture(
        640, 190, "A worker dies: the call raises a named error, and the next call has a new worker", colours
    )
    for lane, name in enumerate(("program", "rank 0", "rank 1")):
        picture.text(10, 57 + 44 * lane, name, at="start")
    picture.box(80, 38, 130, 30)
    picture.text(145, 58, "f(x)")
    picture.box(214, 38, 130, 30, "tint b", "b")
    picture.text(279, 58, "WorkerDied")
    picture.box(400, 38, 150, 30)
    picture.text(475, 58, "f(x), the result")
    picture.box(90, 82, 200, 30, "tint a", "a")
    picture.text(190, 102, "ended, keeps its state")
    picture.box(430, 82, 110, 30, "tint a", "a")
    picture.text(485, 102, "its rows")
    picture.box(90, 126, 100, 30, "tint b", "b")
    picture.text(140, 146, "killed")
    picture.box(300, 126, 120, 30, "tint c", "c")
    picture.text(360, 146, "a new worker")
    picture.box(430, 126, 110, 30, "tint c", "c")
    picture.text(485, 146, "its rows")
    picture.arrow(292, 104, 330, 122, "c")
    picture.text(350, 116, "state", at="start", ink="faint", size=11)
    picture.arrow(80, 176, 620, 176)
    picture.text(620, 170, "time", at="end", ink="faint", size=11)
    return picture


def a_trace(colours: dict[str, str]) -> Picture:
    """Two calls as they were traced: the program and two ranks over time."""
    rows = json.loads(TRACED.read_text(encoding="utf-8"))["rows"]
    first, last = min(row[2] for row in rows), max(row[2] + row[3] for row in rows)
    picture = Picture(640, 200, "A trace of two calls: the program, rank 0 and rank 1 over time", colours)
    scale = 530 / (last - first)
    for process, name in enumerate(("program", "rank 0", "rank 1")):
        picture.text(90, 52 + 48 * process, name, at="end")
    for process, name, start, took, waited in rows:
        kind = name.split()[0]
        ink = {"stage": "b", "wait": "", "assemble": "b", "receive": "b", "publish": "b"}.get(kind, "a")
        x, width = 100 + (start - first) * scale, max(took * scale, 1)
        picture.box(x, 32 + 48 * process, width, 30, f"tint {ink}" if ink else "paper", ink or "line")
        waits = waited * scale  # at the end, as far as is known
        if waits > 60:
            picture.box(x + width - waits, 32 + 48 * process, waits, 30, "paper", "a")
            picture.text(x + width - waits / 2, 52 + 48 * process, "waits", size=12, ink="faint")
            width -= waits
        if width > 60:
            picture.text(x + width / 2, 52 + 48 * process, kind, size=12, ink="ink" if ink else "faint")
    for tick in range(int((last - first) * 19 + 1)):
        x = 100 + tick * 0.05 * scale
        picture.line(x, 172, x, 178)
        picture.text(x, 194, f"{50 * tick} ms", ink="faint", size=12)
    picture.line(100, 172, 630, 172)
    return picture


def transfers(colours: dict[str, str]) -> Picture:
    """What ten calls have transferred for each argument."""
    rows = json.loads(TRACED.read_text(encoding="utf-8"))["transfers"]
    picture = Picture(640, 46 * len(rows) + 44, "Bytes of ten calls: copied, read in place", colours)
    scale = 380 / max(row[2] for row in rows)
    for number, (argument, kind, total, *_) in enumerate(rows):
        y = 14 + 46 * number
        picture.text(60, y + 20, argument, at="end")
        is_copied = kind == "staged"
        picture.box(70, y, total * scale, 30, "tint a" if is_copied else "paper", "a" if is_copied else "line")
        words = "copied" if is_copied else "read in place, not copied"
        picture.text(78 + total * scale, y + 20, f"{total:.0f} MB {words}", at="start", ink="faint", size=12)
    picture.text(70, 46 * len(rows) + 32, "ten calls of residual(table, x, y)", at="start", ink="faint", size=12)
    return picture


PICTURES = {
    "transfers": transfers,
    "a_trace": a_trace,
    "one_call": one_call,
    "where_data_live": where_data_live,
    "three_calls": three_calls,
    "overheads": overheads,
    "speed_ups": speed_ups,
    "copies": copies,
    "number_of_workers": number_of_workers,
    "sums": sums,
    "a_step": a_step,
    "ranks_talk": ranks_talk,
    "who_runs_what": who_runs_what,
    "after_a_death": after_a_death,
}


def for_the_readme() -> str:
    """Return the picture in the README, which pages of any colour show: on paper of its own."""
    picture = speed_ups(THEMES["light"] | {"paper": "#ffffff"})
    picture.behind("paper")
    return picture.svg()


def draw_all(folder: Path) -> None:
    """Draw every picture in both themes, as ``NAME-light.svg`` and ``NAME-dark.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        for theme, colours in THEMES.items():
            draw(colours).save(folder / f"{name}-{theme}.svg")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
