"""Random programs that change what their functions capture, between calls that are compared with plain Python.

A program is a list of lines of Python, so a listing of it can be read, cut short and run again. The functions read all
they capture (``contents.text``): each stale leaf, order, type or alias shows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import os
import random
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from support import harness

import synk

X = np.arange(5.0)
MODULE = "state = [1]\ntable = {'k': 1.0, 'more': [2]}\nrate = 1\ndef helper():\n    return [rate, table, state]\n"
"""What the file of a module holds; its name in a program is ``held_module``, and another one in each run."""

PRELUDE = """
import copy, functools, random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
import numpy as np
from contents import text

class Box:
    factor, items = 1, [1]
    def __init__(self, **attributes): self.__dict__.update(attributes)
    def scaled(self): return self.factor

class Other(Box):
    factor = 2

class Slots:
    __slots__ = ("k", "n")
    def __init__(self, k, n): self.k, self.n = k, n

class AttrDict(dict):
    def __getattr__(self, name):
        if name not in self: raise AttributeError(name)
        return self[name]
    __setattr__ = dict.__setitem__

@dataclass(frozen=True)
class Frozen:
    k: object
    n: object = 0

Point = namedtuple("Point", "k n")

def objects(*values):
    array = np.empty(len(values), object)
    for position, value in enumerate(values): array[position] = value
    return array

def tagged(k):
    def inner(): return k
    inner.n = 0
    return inner

def hand_made(**attributes):
    module = ModuleType("hand_made")
    vars(module).update(attributes)
    return module

def closing(*held): return lambda x: [text(held)] * len(x)
def reads(held, x): return [text(held)] * len(x)

class Reader:
    def __init__(self, *held): self.held = held
    def read(self, x): return [text(self.held)] * len(x)
"""

ITEMS = (dict, UserDict)
SEQUENCES = (list, deque)
NUM_CELLS = 16_000
"""Of a large array: a call may miss that one has changed, so such a change is followed by ``refresh``."""
NUM_ELEMENTS = 2000
"""Of a large list, likewise."""


class Invalid(Exception):
    """A line cannot be run: one before it was left out."""


class Mismatch(AssertionError):
    """A call gave something else than plain Python."""


# ----- generating


class Generator:
    """Makes a program by running it, without workers, so as to know what there is to change."""

    def __init__(self, seed: int, num_steps: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.bench = Bench(None)
        self.numbers = itertools.count(2)
        self.roots: list[str] = []
        self.functions: list[str] = []
        self.has_modules = self.rng.random() < 0.6
        with self.bench:
            self._begin()
            while len(self.lines) < num_steps:
                self._step()
            self._do("results()")
            for name in self.functions:
                self._do(f"check({name!r}, 'call')")
                self._do(f"check({name!r}, 'serial')")

    def _do(self, line: str) -> None:
        self.bench.run(line)
        self.lines.append(line)

    def _begin(self) -> None:
        for name in "abc"[: self.rng.randint(1, 3)]:
            self._do(f"{name} = {self._expression(3)}")
            self.roots.append(name)
        if self.has_modules:
            self._do("import held_module as m")
            self.roots += ["m.state", "m.table"]
            if self.rng.random() < 0.5:
                self._do("from held_module import state, table")
                self.roots.append(self.rng.choice(["state", "table"]))
            if self.rng.random() < 0.5:
                self._do(f"m.more = {self.rng.choice(['a', self._expression(2)])}")
                self.roots.append("m.more")
        for _ in range(self.rng.randint(0, 2)):
            self._change()
        for _ in range(self.rng.randint(1, 2)):
            self._define(f"f{len(self.functions)}")

    def _step(self) -> None:
        steps = (
            (26, self._change),
            (30, self._check),
            (8, self._submit),
            (3, self._stream),
            (4, self._rebind),
            (2, self._delete),
            (3, lambda: self._define(f"f{len(self.functions)}") if len(self.functions) < 4 else self._change()),
            (2, lambda: self._define(self.rng.choice(self.functions))),
            (0.15, lambda: self._do(f"kill({self.rng.randrange(3)})")),
        )
        weights, choices = zip(*steps, strict=True)
        self.rng.choices(choices, weights)[0]()

    # -- steps

    def _check(self) -> None:
        verb = self.rng.choices([*VERBS], [10, 3, 3, 3, 2, 2])[0]
        for _ in range(self.rng.choice([1, 1, 1, 3])):
            self._do(f"check({self.rng.choice(self.functions)!r}, {verb!r})")

    def _submit(self) -> None:
        for _ in range(self.rng.randint(2, 3)):
            self._do(f"submit({self.rng.choice(self.functions)!r})")
            for _ in range(self.rng.randint(0, 2)):
                self._change()
        self._do("results()")

    def _stream(self) -> None:
        """Change something between the batches of a stream."""
        self._do("results()")
        name, between = self.rng.choice(self.functions), []
        for _ in range(self.rng.randint(1, 4)):
            self._change()
            between.append(self.lines.pop())
        self.lines.append(f"stream({name!r}, {between!r})")  # whose changes were made just now

    def _rebind(self) -> None:
        name = self.rng.choice(self.roots)
        value = self.rng.choice([self._expression(3), self.rng.choice(self.roots)])
        self._do(f"{name} = {value}")

    def _delete(self) -> None:
        name = self.rng.choice(self.roots)
        self._do(f"del {name}")
        self._do(f"check({self.rng.choice(self.functions)!r}, 'call')")
        self._do(f"{name} = {self._expression(2)}")

    def _define(self, name: str) -> None:
        roots = self.rng.sample(self.roots, self.rng.randint(1, len(self.roots)))
        held = ", ".join(roots)
        number = next(self.numbers)
        styles = {
            "globals": f"def {name}(x): return [text(({held}, {number}))] * len(x)",
            "helper": f"def h{number}(): return {held}, {number}\ndef {name}(x): return [text(h{number}())] * len(x)",
            "default": f"def {name}(x, *, held=({held},)): return [text(held)] * len(x)",
            "closure": f"{name} = closing({held})",
            "method": f"{name} = Reader({held}).read",
            "partial": f"{name} = functools.partial(reads, [{held}])",
            "lambda in a dict": f"d{number} = {{'f': lambda: ({held},)}}\n"
            f"def {name}(x): return [text(d{number}['f']())] * len(x)",
        }
        if self.has_modules:
            imported = "import held_module\n    from held_module import table as t"
            styles["import in the body"] = (
                f"def {name}(x):\n    {imported}\n    return [text((held_module.state, t, {held}))] * len(x)"
            )
            styles["helper of a module"] = f"def {name}(x): return [text((m.helper(), {held}))] * len(x)"
            styles["getattr of a module"] = f"def {name}(x): return [text((getattr(m, 'state'), m.rate))] * len(x)"
        style = self.rng.choice([*styles])
        self._do(styles[style])
        if name not in self.functions:
            self.functions.append(name)

    def _change(self) -> None:
        """Change one object that some root leads to; where none can be, a root itself."""
        places = list(self._places())
        self.rng.shuffle(places)
        for path, obj in places[:8]:
            lines = self._changes(path, obj)
            if lines:
                self._do(self.rng.choice(lines))
                return
        self._rebind()

    # -- what there is

    def _places(self) -> Iterator[tuple[str, Any]]:
        met: set[int] = set()
        waiting = [(root, self.bench.value(root)) for root in [*self.roots, "Box", "Other"]]
        if self.has_modules:
            waiting.append(("m", self.bench.value("m")))
        while waiting:
            path, obj = waiting.pop()
            if id(obj) in met:
                continue
            met.add(id(obj))
            yield path, obj
            if path.count("[") + path.count(".") < 6:
                waiting += list(_children(path, obj))

    def _new(self, target: Any, depth: int = 1) -> str:
        """Return an expression of a new value, or of an old one: an alias, but not of what ``target`` lies in."""
        if self.rng.random() < 0.2:
            path, obj = self.rng.choice(list(self._places()))
            is_of_class = path.startswith(
                ("Box", "Other")
            )  # verify's copy of an object has the class, not a copy of it
            if not is_of_class and path != "m" and not _leads_to(obj, target):
                return path
        return self._expression(depth)

    def _expression(self, depth: int) -> str:
        n = next(self.numbers)
        if depth == 0 or self.rng.random() < 0.15:
            return self.rng.choice([repr(n), repr(n / 4), repr(f"t{n}"), "None", "True", f"b'{n}'"])
        inner = functools.partial(self._expression, depth - 1)
        kinds: tuple[Callable[[], str], ...] = (
            lambda: f"[{inner()}, {n}]",
            lambda: f"[{inner()}, {inner()}, {inner()}]",
            lambda: f"({inner()}, {inner()})",
            lambda: f"{{'k': {inner()}, {n}: {inner()}}}",
            lambda: f"{{{n}, 't', None}}",
            lambda: f"deque([{inner()}, {n}])",
            lambda: f"bytearray(b'{n}')",
            lambda: f"np.array([{n}.0, 2.0])",
            lambda: f"np.asfortranarray(np.full((2, 3), {n}))",
            lambda: f"np.array({n})",
            lambda: f"np.arange({n}.0, {n + NUM_CELLS}.0)",
            lambda: f"[*range({n}, {n + NUM_ELEMENTS})]",
            lambda: f"objects({inner()}, {n})",
            lambda: f"Box(k={inner()}, n={n})",
            lambda: f"Box(k={inner()})",
            lambda: f"Slots({inner()}, {n})",
            lambda: f"Frozen({inner()}, {n})",
            lambda: f"Point({inner()}, {n})",
            lambda: f"AttrDict(k={inner()}, n={n})",
            lambda: f"OrderedDict(k={inner()}, n={n})",
            lambda: f"defaultdict(list, k={inner()})",
            lambda: f"UserDict(k={inner()}, n={n})",
            lambda: f"Counter(k={n})",
            lambda: f"SimpleNamespace(k={inner()}, n={n})",
            lambda: f"functools.partial(len, {inner()}, k={inner()})",
            lambda: f"tagged({inner()})",
            lambda: f"hand_made(k={inner()})",
            lambda: f"np.random.default_rng({n})",
            lambda: f"random.Random({n})",
            lambda: f"dict.fromkeys(range({n}, {n + 200}))",
        )
        return self.rng.choice(kinds)()

    def _changes(self, path: str, obj: Any) -> list[str]:
        """Return lines that change ``obj`` itself in place."""
        n, new = next(self.numbers), self._new(obj)
        if isinstance(obj, np.ndarray):
            return self._array_changes(path, obj, n, new)
        if isinstance(obj, SEQUENCES):
            return self._sequence_changes(path, obj, n, new)
        if isinstance(obj, ITEMS):
            return self._item_changes(path, obj, n, new)
        if isinstance(obj, set):
            return [f"{path}.add({n})", f"{path}.add({n}) or {path}.discard({self.rng.choice([*obj, 0])!r})"]
        if isinstance(obj, bytearray):
            return [f"{path}[0] = {n % 256}", f"{path}.append({n % 256})", f"{path}.extend(b'{n}')"]
        if isinstance(obj, functools.partial):
            return [f"{path}.keywords['k'] = {new}", f"{path}.n = {n}"]
        if isinstance(obj, (np.random.Generator, random.Random)):
            return [f"{path}.random()"]
        if isinstance(obj, FunctionType):
            return [] if path.startswith("m.") else [f"{path}.n = {n}", f"{path}.more{n} = {new}"]
        if isinstance(obj, type):
            return [f"{path}.factor = {n}", f"{path}.scaled = lambda self: {n}", f"{path}.kept = {self._expression(1)}"]
        if path == "m":
            return [f"m.rate = {n}"]
        return self._attribute_changes(path, obj, n, new)

    def _array_changes(self, path: str, obj: np.ndarray, n: int, new: str) -> list[str]:
        if obj.dtype == object:
            return [f"{path}[{n % len(obj)}] = {new}"]
        dense = [f"np.add({path}, {n}, out={path})", f"{path}[...] = {n}"]
        if obj.size == NUM_CELLS:
            return [*dense, f"late({path}, '__setitem__', {self.rng.randrange(NUM_CELLS)}, {n})"]
        return [*dense, f"{path}.flat[0] = {n}"]

    def _sequence_changes(self, path: str, obj: Any, n: int, new: str) -> list[str]:
        if len(obj) >= NUM_ELEMENTS // 2:
            acts = [f"'__setitem__', {self.rng.randrange(len(obj))}, {n}"] * 3
            acts += [f"'append', {n}", f"'insert', 0, {n}", f"'pop', {self.rng.randrange(len(obj))}", "'reverse'"]
            return [f"late({path}, {act})" for act in acts]
        lines = [f"{path}.append({new})", f"{path}.append({n})", f"{path}.insert(0, {new})"]
        if obj:
            position = self.rng.randrange(len(obj))
            lines += [f"{path}[{position}] = {new}", f"{path}[{position}] = {n}", f"del {path}[{position}]"]
        if len(obj) > 1:
            lines += [f"{path}.reverse()", f"{path}.append({path}[0])", f"{path}[0], {path}[1] = {path}[1], {path}[0]"]
        return [*lines, f"{path}.clear()"] if self.rng.random() < 0.1 else lines

    def _item_changes(self, path: str, obj: Any, n: int, new: str) -> list[str]:
        if isinstance(obj, Counter):
            return [f"{path}['k'] += 1", f"{path}.update('ab')"]
        lines = [f"{path}['k{n}'] = {new}", f"{path}.update(k={n})"]
        if obj:
            key = repr(self.rng.choice([*obj]))
            lines += [f"{path}[{key}] = {new}", f"{path}[{key}] = {n}", f"del {path}[{key}]"]
            lines += [f"{path}['k{n}'] = {path}.pop({key})", f"{path}[{key}] = {path}.pop({key})"]
        return lines

    def _attribute_changes(self, path: str, obj: Any, n: int, new: str) -> list[str]:
        if type(obj).__name__ == "Slots":
            return [f"{path}.k = {new}", f"{path}.n = {n}"]
        if type(obj).__name__ in ("Box", "Other"):
            other = "Other" if type(obj).__name__ == "Box" else "Box"
            return [f"{path}.k = {new}", f"{path}.n = {n}", f"{path}.more{n} = {new}", f"{path}.__class__ = {other}"]
        if isinstance(obj, SimpleNamespace) or type(obj).__name__ == "module":
            return [f"{path}.k = {new}", f"{path}.n = {n}"]
        return []


def _children(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with the expression that leads to it."""
    if isinstance(obj, list) and len(obj) >= NUM_ELEMENTS // 2:
        return
    if isinstance(obj, (list, deque)) or type(obj) is tuple or (isinstance(obj, np.ndarray) and obj.dtype == object):
        yield from ((f"{path}[{position}]", value) for position, value in enumerate(obj))
    elif isinstance(obj, ITEMS) and len(obj) < 50:
        yield from ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, functools.partial):
        yield from ((f"{path}.args[{position}]", value) for position, value in enumerate(obj.args))
        yield f"{path}.keywords", obj.keywords
    elif isinstance(obj, FunctionType):
        yield from ((f"{path}.{name}", value) for name, value in vars(obj).items())
        if obj.__name__ == "inner":
            yield f"{path}()", obj()
    elif isinstance(obj, type):
        yield f"{path}.items", obj.items
    elif type(obj).__name__ in ("Box", "Other", "SimpleNamespace", "module") and path != "m":
        yield from ((f"{path}.{name}", value) for name, value in vars(obj).items() if not name.startswith("_"))
    elif type(obj).__name__ in ("Slots", "Frozen", "Point"):
        yield from ((f"{path}.{name}", getattr(obj, name)) for name in ("k", "n"))


def _leads_to(obj: Any, target: Any) -> bool:
    met, waiting = set(), [obj]
    while waiting:
        each = waiting.pop()
        if each is target:
            return True
        if id(each) not in met:
            met.add(id(each))
            waiting += [child for _, child in _children("", each)]
    return False


def generate(seed: int, num_steps: int = 30) -> list[str]:
    """Return the program of a seed."""
    return Generator(seed, num_steps).lines


# ----- running

VERBS: dict[str, Callable[[Any, Any, Any], list[str]]] = {
    "call": lambda rt, f, plain: f(X),
    "submit": lambda rt, f, plain: f.submit(X).result(),
    "serial": lambda rt, f, plain: f.serial(X),
    "map": lambda rt, f, plain: [*rt.map(lambda item: plain(X[:1])[0], range(len(X)))],
    "stream": lambda rt, f, plain: [row for rows in f.stream([X[:2], X[2:]]) for row in rows],
    "verify": lambda rt, f, plain: f(X) if (report := f.verify(X)) else [str(report)] * len(X),
}


@functools.cache
def _modules_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of all modules, which lasts as long as the process: a new worker may load an older function."""
    return tempfile.TemporaryDirectory(prefix="synk-programs-")


class Bench:
    """Runs the lines of one program, with the workers of a runtime, or for ``None`` with none.

    Use as a context manager: inside, the module of the program can be imported.
    """

    _serial = itertools.count()

    def __init__(self, rt: Any) -> None:
        self.rt = rt
        self._number = next(self._serial)
        self._module = f"held_module_{self._number}"
        self._folder = _modules_folder().name
        self._functions: dict[str, tuple[Any, Any]] = {}
        self._pending: list[tuple[str, Any, Any]] = []
        actions = (self.check, self.submit, self.results, self.stream, self.kill, self.late)
        self.names: dict[str, Any] = {"__name__": "__main__", **{each.__name__: each for each in actions}}
        exec(PRELUDE, self.names)

    def __enter__(self) -> Bench:
        Path(self._folder, f"{self._module}.py").write_text(MODULE)
        os.utime(self._folder, (self._number, self._number))  # the importer's sign that the folder is not what it was
        sys.path.insert(0, self._folder)
        importlib.invalidate_caches()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(Exception):
            for _, call, _ in self._pending:
                call.result()
        self._functions.clear()
        self.names.clear()
        sys.path.remove(self._folder)
        sys.modules.pop(self._module, None)

    def run(self, line: str) -> None:
        """Run one line."""
        try:
            exec(line.replace("held_module", self._module), self.names)
        except Mismatch:
            raise
        except Exception as error:
            raise Invalid(f"{line}: {type(error).__name__}: {error}") from error

    def value(self, path: str) -> Any:
        return eval(path, self.names)

    # -- what lines call

    def check(self, name: str, verb: str) -> None:
        """Call a function and compare."""
        plain, f = self._function(name)
        want = _outcome(lambda: plain(X))
        if self.rt is not None:
            act = {**VERBS, "verify": self._verified}[verb]
            self._compare(name, verb, lambda: act(self.rt, f, plain), want)

    def _verified(self, rt: Any, f: Any, plain: Any) -> list[str]:
        """Verify, and call."""
        report = f.verify(X)
        return VERBS["call"](rt, f, plain) if _is_right(report) else [str(report)]

    def submit(self, name: str) -> None:
        """Submit a call, to be compared later with what there is now."""
        plain, f = self._function(name)
        want = _outcome(lambda: plain(X))
        if self.rt is None:
            return
        if len(self._pending) == 3:
            self.results()
        self._pending.append((name, f.submit(X), want))

    def results(self) -> None:
        """Compare the results of what was submitted."""
        pending, self._pending = self._pending, []
        for name, call, want in pending:
            self._compare(name, "submit", call.result, want)

    def stream(self, name: str, between: Sequence[str]) -> None:
        """Run lines between the batches of a stream."""
        plain, f = self._function(name)
        wants: list[Any] = []

        def batches() -> Iterator[np.ndarray]:
            for line in ["pass", *between]:
                self.run(line)
                wants.append(_outcome(lambda: plain(X)))
                if isinstance(wants[-1], Exception):
                    raise Invalid("a stream of a function that raises")
                yield X

        if self.rt is None:
            list(batches())
            return
        self.results()
        for number, got in enumerate(f.stream(batches())):
            self._compare(name, f"stream, batch {number}", lambda got=got: got, wants[number])

    def kill(self, rank: int) -> None:
        """End a worker; the next call starts another."""
        if self.rt is not None:
            self.results()
            harness.kill_and_wait(harness.pids(self.rt)[rank % self.rt.world_size])
            harness.pids(self.rt)

    def late(self, obj: Any, act: str, *args: Any) -> None:
        """Change a large array or list where calls may miss it, and say so."""
        getattr(obj, act)(*args)

    # -- comparing

    def _function(self, name: str) -> tuple[Any, Any]:
        plain, known = self.names[name], self._functions.get(name)
        if known is None or known[0] is not plain:
            f = None if self.rt is None else self.rt.function(plain, outputs="gather")
            known = self._functions[name] = plain, f
        return known

    def _compare(self, name: str, verb: str, act: Callable[[], Any], want: Any) -> None:
        got = _outcome(act)
        if not _is_same(got, want):
            raise Mismatch(f"{name} by {verb}\n  got  {_shown(got, want)}\n  want {_shown(want, got)}")


def _is_right(report: Any) -> bool:
    """Whether a report is true, but for aliases of objects in modules, which are not copied with the plain function.

    What it says to have changed unseen is no matter here: the calls behind it are right.
    """
    return all(output.verdict == "equal" for output in report.outputs)


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return error


def _is_same(got: Any, want: Any) -> bool:
    if isinstance(want, Exception):
        return isinstance(got, type(want))
    return not isinstance(got, Exception) and got == want


def _shown(value: Any, other: Any) -> str:
    """Return the first row in which two results differ, or the error."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    rows = [row for row, each in enumerate(value) if not isinstance(other, list) or other[row : row + 1] != [each]]
    return f"rows {rows}: {value[rows[0]]}" if rows else f"{len(value)} rows"


def run(lines: Sequence[str], rt: Any) -> tuple[int, str] | None:
    """Run lines; return the number of the line that went wrong, and what it said. An invalid program is fine."""
    with Bench(rt) as bench, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large objects, and of workers that were started again
        for number, line in enumerate(lines):
            try:
                bench.run(line)
            except Mismatch as error:
                return number, str(error)
            except Invalid as error:
                if isinstance(error.__cause__, synk.errors.SynkError):
                    return number, str(error)
                return None
    return None


def shortened(lines: list[str], rt: Any, max_s: float = 20.0) -> list[str]:
    """Return lines that go wrong, without those that are not needed for it."""
    end = time.monotonic() + max_s
    size = max(1, len(lines) // 2)
    while size:
        start = 0
        while start < len(lines) and time.monotonic() < end:
            fewer = lines[:start] + lines[start + size :]
            found = run(fewer, rt)
            if found is None:
                start += size
            else:
                lines = fewer[: found[0] + 1]
        size //= 2
    return lines


def failure(seed: int, rt: Any) -> str:
    """Run the program of a seed; return "" or a report with the lines that are needed to go wrong."""
    lines = generate(seed)
    found = run(lines, rt)
    if found is None:
        return ""
    lines = shortened(lines[: found[0] + 1], rt)
    again = run(lines, rt) or (0, f"not again, but: {found[1]}")
    return f"seed {seed}, {rt.world_size} workers: {again[1]}\n" + textwrap.indent("\n".join(lines), "    ")


@contextlib.contextmanager
def another_thread() -> Iterator[None]:
    """Have a second thread of Python, beside which the interpreter's memory is not read to compare containers."""
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run_seeds(seeds: Iterable[int], runtime_of: Callable[[int], Any]) -> list[str]:
    """Run the programs of many seeds; return the reports of those that went wrong, at most ten."""
    failures: list[str] = []
    for seed in seeds:
        with another_thread() if seed % 3 == 0 else contextlib.nullcontext():
            failures += filter(None, [failure(seed, runtime_of((2, 2, 2, 1, 3)[seed % 5]))])
        if seed % 50 == 0:
            gc.collect()
        if len(failures) == 10:
            break
    return failures
