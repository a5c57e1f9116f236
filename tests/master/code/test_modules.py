"""Modules of the user's that workers import themselves: what the program has bound or changed there, whenever it did.

The expected values come from the same function, called by plain Python in this process.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contents import text
from support import harness

import synk

X = np.arange(4.0)
WORKERS = (2, 1, 3, "inline")
VERBS: dict[str, Callable[[Any, Any, Any], list[str]]] = {
    "call": lambda rt, f, plain: f(X),
    "submit": lambda rt, f, plain: f.submit(X).result(),
    "serial": lambda rt, f, plain: f.serial(X),
    "verify": lambda rt, f, plain: f(X) if (report := f.verify(X)) else [str(report)],
    "map": lambda rt, f, plain: [*rt.map(lambda item: plain([item])[0], X)],
    "stream": lambda rt, f, plain: [row for rows in f.stream([X[:1], X[1:]]) for row in rows],
}


@dataclass(frozen=True)
class Case:
    """Modules, a program that reads them in ``held()``, and lines that change them.

    Names of modules begin with ``users_`` and get a number, so that each test has its own.
    """

    files: dict[str, str]
    program: str
    changes: tuple[str, ...]


CONFIG = {"users_config": "k = 1\ntable = None\nsettings = {'lr': 1, 'layers': [1]}\ndef read(): return k, settings\n"}
HELPERS = {
    "users_helpers": """
table = None
def init(n=1):
    global table
    table = [n]
def step(): return 1
def run(): return step(), table
class Layer:
    factor, items = 1, [1]
    def __init__(self): self.w = [1]
    def run(self): return self.w, self.factor, self.items
layer = Layer()
registry = {}
def apply(): return [function() for function in registry.values()]
def with_default(n=1): return n, getattr(with_default, 'rate', 0)
def counter():
    count = [0]
    def inner():
        return count[0]
    inner.advance = lambda: count.append(count.pop() + 1)
    return inner
count = counter()
"""
}
PACKAGE = {
    "users_package/__init__": "k = 1\n",
    "users_package/sub": "table, k = [1], 1\n",
    "users_package/user": "from . import sub\nfrom .sub import table\ndef helper(): return table, sub.table, sub.k\n",
}
HIDDEN = {
    "users_hidden": "_values = {'k': 1}\ndef __getattr__(name):\n    try: return _values[name]\n"
    "    except KeyError: raise AttributeError(name) from None\n"
}
PAIR = {
    "users_a": "table = [1]\n",
    "users_b": "import users_a\nown = users_a.table\nother = None\ndef read(): return own\n",
}
UNSENDABLE = {
    "users_lock": "import threading, logging\nlock, log, k = threading.Lock(), logging.getLogger('users'), [1]\n"
    "squares = (n * n for n in range(9))\ndef read():\n    with lock: return k, log.name, squares is not None\n"
}
CLASSES = {
    "users_classes": """
import enum, functools, users_parts
class Config:
    class Train:
        lr, steps = 1, [1]
        def run(self): return self.lr, self.steps
    instance = Train()
class Level(enum.Enum):
    LOW, HIGH = 1, 2
    def weight(self): return self.value
def scaled(**by):
    def decorate(function):
        @functools.wraps(function)
        def run(*args): return function(*args), by
        run.by = by
        return run
    return decorate
class Layer:
    def run(self): return 1
    def other(self): return 2
    @staticmethod
    def fixed(): return 3
    @classmethod
    def named(cls): return cls.__name__
    @property
    def size(self): return 4, Layer.size.fget.unit
    size.fget.unit = 'm'
    @functools.cached_property
    def cached(self): return 5
    @scaled(k=1)
    def decorated(self): return 6
    def with_default(self, items=[1]): return items
    def late(self):
        import users_parts
        return users_parts.k
    class Inner:
        def run(self): return 7
def step(): return 8
@functools.lru_cache
def cached(): return 9
""",
    "users_parts": "k = 1\n",
}
PUT_BACK = """
import users_classes
Layer = users_classes.Layer
run, fixed, named, size, inner = (vars(Layer)[name] for name in ('run', 'fixed', 'named', 'size', 'Inner'))
inner_run, step, cached = inner.run, users_classes.step, users_classes.cached
def held():
    layer = Layer()
    return (
        layer.run(), layer.other(), layer.fixed(), layer.named(), layer.size, layer.Inner().run(), users_classes.step(),
        users_classes.cached(), Layer().cached,
    )
def patch():
    Layer.run = lambda self: run(self) + 10
    Layer.fixed = staticmethod(lambda: fixed.__func__() + 10)
    Layer.named = classmethod(lambda cls: named.__func__(cls) * 2)
    Layer.size = property(lambda self: 14)
    inner.run = lambda self: inner_run(self) + 10
    users_classes.step = lambda: step() + 10
    users_classes.cached = lambda: cached() + 10
def put_back():
    Layer.run, Layer.fixed, Layer.named, Layer.size, inner.run = run, fixed, named, size, inner_run
    users_classes.step, users_classes.cached = step, cached
"""

CASES = {
    "array bound": Case(
        CONFIG,
        "import users_config\ndef held(): return users_config.table",
        ("users_config.table = np.zeros(3)", "users_config.table[1] = 5", "users_config.table = np.ones(2)"),
    ),
    "number bound": Case(
        CONFIG,
        "import users_config\ndef held(): return users_config.read()",
        ("users_config.k = 2", "users_config.k += 1"),
    ),
    "by vars()": Case(
        CONFIG,
        "import users_config\ndef held(): return users_config.read()",
        ("vars(users_config)['k'] = 5", "vars(users_config)['k'] = 6"),
    ),
    "dict and list in place": Case(
        CONFIG,
        "import users_config\ndef held(): return users_config.settings",
        (
            "users_config.settings['lr'] = 5",
            "users_config.settings['layers'].append(2)",
            "users_config.settings['new'] = 1",
        ),
    ),
    "in place, behind a function of the module": Case(
        CONFIG,
        "from users_config import read, settings\ndef held(): return read()",
        ("settings['lr'] = 5", "settings['layers'].append(2)", "settings['rate'] = settings.pop('lr')"),
    ),
    "name removed and back": Case(
        CONFIG,
        "import users_config\ndef held(): return getattr(users_config, 'k', 'none')",
        ("del users_config.k", "users_config.k = 3"),
    ),
    "new name": Case(
        CONFIG,
        "import users_config\ndef held(): return getattr(users_config, 'new', None)",
        ("users_config.new = [1]", "users_config.new.append(2)"),
    ),
    "imported in the body": Case(
        CONFIG,
        "def held():\n    import users_config\n    return users_config.k, users_config.table, users_config.settings",
        (
            "import users_config; users_config.k = 7",
            "users_config.table = np.ones(2)",
            "users_config.settings['lr'] = 3",
        ),
    ),
    "names imported in the body": Case(
        CONFIG,
        "def held():\n    from users_config import k, settings as s\n    return k, s",
        ("import users_config; users_config.k = 7", "users_config.settings['layers'].append(3)"),
    ),
    "imported in the body by its name": Case(
        CONFIG,
        "import importlib\ndef held(): return importlib.import_module('users_config').settings",
        ("import users_config; users_config.settings['lr'] = 3", "users_config.settings = {}"),
    ),
    "found in sys.modules": Case(
        CONFIG,
        "import sys, users_config\ndef held(): return sys.modules['users_config'].settings",
        ("users_config.settings['lr'] = 3", "users_config.settings = {}"),
    ),
    "module in a dict": Case(
        CONFIG,
        "import users_config\nmodules = {'m': users_config}\ndef held(): return getattr(modules['m'], 'settings')",
        ("users_config.settings['lr'] = 3", "users_config.settings = [1]", "users_config.settings.append(2)"),
    ),
    "init()": Case(
        HELPERS,
        "import users_helpers\ndef held(): return users_helpers.run()",
        ("users_helpers.init()", "users_helpers.init(2)", "users_helpers.table.append(3)"),
    ),
    "function bound": Case(
        HELPERS,
        "import users_helpers\nrate = 5\ndef my_step(): return rate\ndef held(): return users_helpers.run()",
        ("users_helpers.step = my_step", "rate = 6", "users_helpers.step = lambda: 9"),
    ),
    "function bound, read by a name of the program": Case(
        HELPERS,
        "from users_helpers import run\nimport users_helpers\ndef held(): return run()",
        ("users_helpers.step = lambda: 7", "users_helpers.step.__code__ = (lambda: 8).__code__"),
    ),
    "method bound": Case(
        HELPERS,
        "import users_helpers\nlayer = users_helpers.Layer()\ndef held(): return layer.run()",
        (
            "users_helpers.Layer.run = lambda self: ('mine', self.w)",
            "layer.w.append(3)",
            "users_helpers.Layer.run = lambda self: len(self.w)",
        ),
    ),
    "class attribute": Case(
        HELPERS,
        "from users_helpers import Layer\nlayer = Layer()\ndef held(): return layer.run()",
        ("Layer.factor = 3", "Layer.items.append(2)", "Layer.items = []"),
    ),
    "instance in the module": Case(
        HELPERS,
        "import users_helpers\ndef held(): return users_helpers.layer.run()",
        ("users_helpers.layer.w.append(2)", "users_helpers.layer.factor = 2", "users_helpers.layer.w = 3"),
    ),
    "registry": Case(
        HELPERS,
        "import users_helpers\ndef held(): return users_helpers.apply()",
        ("users_helpers.registry['one'] = lambda: 1", "users_helpers.registry['two'] = lambda: 2"),
    ),
    "defaults and attributes of a function": Case(
        HELPERS,
        "import users_helpers\ndef held(): return users_helpers.with_default()",
        ("users_helpers.with_default.rate = 3", "users_helpers.with_default.__defaults__ = (7,)"),
    ),
    "closure made in the module": Case(
        HELPERS,
        "import users_helpers\ndef held(): return users_helpers.count()",
        ("users_helpers.count.advance()", "users_helpers.count.advance()"),
    ),
    "a module's __getattr__": Case(
        HIDDEN,
        "import users_hidden\ndef held(): return users_hidden.k",
        ("users_hidden._values['k'] = 5", "users_hidden._values = {'k': 6}", "users_hidden.k = 7"),
    ),
    "from import, next to the module": Case(
        CONFIG,
        "import users_config\nfrom users_config import settings\ndef held(): return settings, users_config.settings",
        ("settings['lr'] = 5", "users_config.settings['layers'].append(2)", "users_config.settings = {}"),
    ),
    "submodule": Case(
        PACKAGE,
        "import users_package.sub\ndef held(): return users_package.sub.table, users_package.sub.k, users_package.k",
        ("users_package.sub.k = 2", "users_package.sub.table.append(2)", "users_package.k = 3"),
    ),
    "submodule, behind another": Case(
        PACKAGE,
        "from users_package import sub, user\ndef held(): return user.helper()",
        ("sub.k = 2", "sub.table.append(2)", "sub.table = [7]", "user.table.append(5)"),
    ),
    "two modules that share an object": Case(
        PAIR,
        "import users_a, users_b\ndef held(): return users_a.table, users_b.read(), users_b.other",
        ("users_b.other = users_a.table", "users_a.table.append(2)", "users_b.own.append(3)", "users_b.own = 5"),
    ),
    "an object of the program in a module": Case(
        PAIR,
        "import users_a, users_b\nmine = [1]\ndef held(): return mine, users_a.table, users_b.other",
        ("users_a.table = users_b.other = mine", "mine.append(2)", "users_b.other.append(3)"),
    ),
    "nested class": Case(
        CLASSES,
        "from users_classes import Config\ndef held(): return Config.Train().run(), Config.instance.run()",
        (
            "Config.Train.lr = 5",
            "Config.Train.steps.append(2)",
            "Config.Train.run = lambda self: self.lr",
            "Config.instance.lr = 7",
        ),
    ),
    "enum": Case(
        CLASSES,
        "from users_classes import Level\n"
        "def held(): return Level.HIGH.weight(), Level(1).name, len(Level), getattr(Level, 'unit', 0)",
        ("Level.weight = lambda self: -self.value", "Level.unit = [1]", "Level.unit.append(2)"),
    ),
    "what methods hold": Case(
        CLASSES,
        "from users_classes import Layer\ndef held(): return Layer().size, Layer().decorated(), Layer().with_default()",
        (
            "Layer.size.fget.unit = 'km'",
            "Layer.decorated.by['k'] = 5",
            "Layer.with_default.__defaults__[0].append(2)",
            "Layer.with_default.__defaults__ = ([3],)",
        ),
    ),
    "imported in a method": Case(
        {**CLASSES, "users_classes": CLASSES["users_classes"].replace(", users_parts\nclass", "\nclass")},
        "from users_classes import Layer\ndef held(): return Layer().late()",
        ("import users_parts; users_parts.k = 5", "users_parts.k = [6]", "users_parts.k.append(7)"),
    ),
    "patched and put back": Case(CLASSES, PUT_BACK, ("patch()", "put_back()", "patch()", "put_back()")),
    "methods that change places": Case(
        CLASSES,
        PUT_BACK,
        ("Layer.run, Layer.other = Layer.other, Layer.run", "Layer.run, Layer.other = Layer.other, Layer.run"),
    ),
    "beside what cannot be sent": Case(
        UNSENDABLE,
        "import users_lock\ndef held(): return users_lock.read()",
        ("users_lock.k.append(2)", "users_lock.k = 5"),
    ),
}


class Program:
    """A program whose modules are its own."""

    _serial = itertools.count()

    def __init__(self, folder: Path, files: dict[str, str], source: str) -> None:
        self._number = next(self._serial)
        self.names: dict[str, Any] = {"__name__": "__main__", "np": np, "text": text}
        for name, contents in files.items():
            path = folder / f"{self.own(name)}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.own(contents))
        importlib.invalidate_caches()
        self.run(source)

    def run(self, line: str) -> None:
        exec(self.own(line), self.names)

    def forget(self) -> None:
        """Take the modules out of this process."""
        for name in [name for name in sys.modules if name.startswith(f"users{self._number}_")]:
            del sys.modules[name]

    def own(self, source: str) -> str:
        return re.sub(r"\busers_", f"users{self._number}_", source)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Program]]:
    """Return ``program(files, source)``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made: list[Program] = []

    def make(files: dict[str, str], source: str) -> Program:
        made.append(Program(tmp_path, files, source))
        return made[-1]

    yield make
    for each in made:
        each.forget()


READS = "\ndef reads(x): return [text(held())] * len(x)\n"


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("first_call", ["before the changes", "after the first change", "after all changes"])
def test_what_is_changed_in_modules_reaches_the_workers(
    shared_runtimes: Any, program: Callable[..., Program], name: str, num_workers: Any, first_call: str
) -> None:
    if num_workers == "inline" and name in ("an object of the program in a module", "from import, next to the module"):
        pytest.skip("the module is the program's own there, and what the function captured a copy: two objects")
    case, rt = CASES[name], shared_runtimes[num_workers]
    main = program(case.files, case.program + READS)
    plain = main.names["reads"]
    f, verbs = rt.function(plain, outputs="gather"), itertools.cycle(VERBS)

    def check(after: str) -> None:
        for verb in (next(verbs), "call"):
            want = plain(X)
            got = VERBS[verb](rt, f, plain)
            assert got == want, f"{after}, by {verb}\n  got  {got[0]}\n  want {want[0]}"

    if first_call == "before the changes":
        check("no change")
    for number, change in enumerate(case.changes):
        main.run(change)
        if first_call != "after all changes" or number == len(case.changes) - 1:
            check(change)


@pytest.mark.parametrize("name", CASES)
def test_submitted_calls_see_modules_as_they_were(
    shared_runtimes: Any, program: Callable[..., Program], name: str
) -> None:
    case = CASES[name]
    main = program(case.files, case.program + READS)
    plain, f = main.names["reads"], shared_runtimes[2].function(main.names["reads"], outputs="gather")
    want, calls = [], []
    for change in ("pass", *case.changes)[:3]:
        main.run(change)
        want.append(plain(X))
        calls.append(f.submit(X))
    assert [call.result() for call in calls] == want


def test_one_object_by_two_names_is_one_on_each_worker(shared_runtimes: Any, program: Callable[..., Program]) -> None:
    """What is appended through one name is read through the other, by functions of the program and of the module."""
    files = {"users_m": "state = [0]\ndef grow(): state.append(1)\n"}
    source = """
    from users_m import state, grow
    import users_m
    def by_name(x): state.append(1); return len(users_m.state)
    def by_module(x): users_m.state.append(1); return len(state)
    def by_helper(x): grow(); return len(state), len(users_m.state), state is users_m.state
    """
    main = program(files, re.sub("(?m)^    ", "", source))
    by_name, by_module, by_helper = (
        shared_runtimes[2].function(main.names[name], outputs=None) for name in ("by_name", "by_module", "by_helper")
    )
    assert by_name(X) == [2, 2]
    assert by_module(X) == [3, 3]
    assert by_helper(X) == [(4, 4, True)] * 2
    assert by_name(X) == [5, 5]
    main.run("state.append(1); state.append(1)")  # both sides changed the list: the program's wins
    assert by_module(X) == [4, 4]


@pytest.mark.parametrize("order", ["changed, then killed", "killed, then changed"])
def test_a_worker_that_was_started_again_has_the_modules_of_now(
    runtime: Callable[..., Any], program: Callable[..., Program], order: str
) -> None:
    rt = runtime(2, max_restarts=10)
    mains = {name: program(case.files, case.program + READS) for name, case in CASES.items()}
    functions = {name: rt.function(main.names["reads"], outputs="gather") for name, main in mains.items()}
    failures = []
    for name, f in functions.items():
        if order.startswith("changed"):
            mains[name].run(CASES[name].changes[0])
        f(X)
    for step in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            harness.kill_and_wait(harness.pids(rt)[1])
            harness.pids(rt)
        for name, f in functions.items():
            if order.startswith("killed"):
                for change in CASES[name].changes[step - 1 : step]:
                    mains[name].run(change)
            want = mains[name].names["reads"](X)
            if (got := f(X)) != want:
                rows = [row for row in range(len(X)) if got[row] != want[row]]
                failures.append(f"{name}, step {step}, rows {rows}\n  got  {got[rows[0]]}\n  want {want[0]}")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures)


def test_what_a_rank_has_changed_in_a_module_stays_its_own(
    shared_runtimes: Any, program: Callable[..., Program]
) -> None:
    files = {"users_m": "seen, k, cache = 0, 1, {}\ndef count():\n    global seen\n    seen += 1\n    return seen\n"}
    main = program(
        files, "import users_m\ndef f(x):\n    users_m.cache['x'] = 1\n    return users_m.count(), users_m.k"
    )
    f = shared_runtimes[2].function(main.names["f"], outputs="first")
    assert [f(X), f(X)] == [(1, 1), (2, 1)]
    main.run("users_m.k = 5")
    assert [f(X), f(X)] == [(3, 5), (4, 5)]
    main.run("users_m.cache['y'] = 2")
    assert f(X) == (5, 5)
    main.run("users_m.seen = 100")
    assert [f(X), f(X)] == [(101, 5), (102, 5)]


def test_a_module_that_makes_something_of_each_process(shared_runtimes: Any, program: Callable[..., Program]) -> None:
    """What the import makes in a worker, and the program has not touched, is the worker's."""
    files = {"users_m": "import os, threading\nlock, k = threading.Lock(), 1\ndef pid(): return os.getpid(), k\n"}
    main = program(files, "import users_m\ndef f(x):\n    with users_m.lock: return users_m.pid()")
    f = shared_runtimes[2].function(main.names["f"], outputs=None)
    for k in (1, 2):
        main.run(f"users_m.k = {k}")
        (first, seen_by_first), (second, seen_by_second) = f(X)
        assert len({first, second, os.getpid()}) == 3
        assert seen_by_first == seen_by_second == k


def test_a_module_that_calls_a_library_by_ctypes(
    shared_runtimes: Any, program: Callable[..., Program], caplog: pytest.LogCaptureFixture
) -> None:
    """Its types are made by each import; pickled ones can neither be loaded nor bound."""
    source = """
import ctypes
class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))
Pointer, Pair, k = ctypes.POINTER(Point), Point * 2, 1
def read(x): return k * Pointer(Pair((1, 2), (3, 4))[1]).contents.y
"""
    main = program({"users_m": source}, "import users_m\ndef f(x): return users_m.read(x)")
    f = shared_runtimes[2].function(main.names["f"], outputs="first")
    assert f(X) == 4
    main.run("users_m.k = 2")
    assert f(X) == 8
    assert not caplog.text


@pytest.mark.parametrize("num_workers", (2, "inline"))
def test_an_argument_of_a_modules_class_has_the_methods_of_now(
    shared_runtimes: Any, program: Callable[..., Program], num_workers: Any
) -> None:
    """The function names neither the class nor its module."""
    source = "k = 1\nclass Model:\n    def rate(self): return k\n"
    main = program({"users_m": source}, "import users_m\nmodel = users_m.Model()")
    model, ones, rt = main.names["model"], np.ones(2), shared_runtimes[num_workers]
    passed = rt.function(lambda x, model: x * model.rate(), outputs="gather", bcast_inputs="model")
    nested = rt.function(lambda x, models: x * models[0].rate(), outputs="gather", bcast_inputs="models")
    for k in (1, 2, 3):
        main.run(f"users_m.k = {k}")
        assert passed(ones, model).tolist() == passed.submit(ones, model).result().tolist() == [k, k]
        assert nested(ones, [model]).tolist() == [k, k]
        assert [*rt.map(lambda model: model.rate(), [model, model])] == [k, k]
    main.run("users_m.Model.rate = lambda self: 7")
    assert passed(ones, model).tolist() == nested(ones, [model]).tolist() == [7, 7]


class OnlyHere:
    """Can be pickled, and loaded in the process that made it alone."""

    def __reduce__(self) -> Any:
        return load_only_in, (os.getpid(),)


def load_only_in(pid: int) -> Any:
    if os.getpid() != pid:
        raise ValueError("made for another process")
    return OnlyHere()


def test_what_workers_cannot_load_into_a_module_is_told(
    shared_runtimes: Any, program: Callable[..., Program], caplog: pytest.LogCaptureFixture
) -> None:
    main = program({"users_m": "k, thing = 1, None\n"}, "import users_m\ndef f(x): return users_m.k, users_m.thing")
    main.names["here"] = OnlyHere()
    main.run("users_m.thing, users_m.k = here, 2")
    f = shared_runtimes[2].function(main.names["f"], outputs="first")
    assert f(X) == (2, None)
    assert "made for another process" in caplog.text
    assert "keeps what its own import of a module has made" in caplog.text


def test_a_submodule_that_only_workers_have_imported_stays(
    shared_runtimes: Any, program: Callable[..., Program]
) -> None:
    """What the program has removed from a package goes; what only the worker has imported into it does not."""
    source = "import users_p\ndef f(x):\n    import users_p.sub\n    return users_p.sub.k, hasattr(users_p, 'extra')"
    main = program({"users_p/__init__": "extra = 1\n", "users_p/sub": "k = 7\n"}, source)
    f = shared_runtimes[2].function(main.names["f"], outputs="first")
    assert f(X) == (7, True)
    main.run("del users_p.extra")
    assert f(X) == (7, False)


@pytest.mark.parametrize("num_workers", [2, 1])
def test_a_reload_that_did_not_arrive_is_sent_again(
    shared_runtimes: Any, program: Callable[..., Program], num_workers: int
) -> None:
    """The call that would bring it fails over something else that it captured."""
    main = program(
        {"users_m": "def step(): return 1\n"},
        "import users_m\nheld = []\ndef f(x): return [users_m.step() + len(held)] * len(x)",
    )
    f = shared_runtimes[num_workers].function(main.names["f"], outputs="gather")
    assert f(X) == [1] * 4
    path = Path(sys.modules[main.own("users_m")].__file__ or "")
    path.write_text("def step(): return 100\n")
    importlib.reload(sys.modules[main.own("users_m")])
    main.names["held"].append(threading.Lock())
    with pytest.raises(synk.errors.SerializationError):
        f(X)
    main.names["held"][:] = [5]
    assert f(X) == [101] * 4
