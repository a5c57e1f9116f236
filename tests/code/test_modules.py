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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contents import text
from programs import VERBS, X
from support import harness

import synk

WORKERS = (2, 1, 3, 0)

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
DEFAULTS = """
def scaled(a=1, *, b=2): return a, b
class Model:
    def scaled(self, a=1, *, b=2): return a, b
    @staticmethod
    def fixed(a="x"): return a
    @classmethod
    def named(cls, a=1.5): return a
"""

POINTS = {
    "users_points": """
import ctypes
class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))
Pointer, Pair, k = ctypes.POINTER(Point), Point * 2, 1
def read(): return k * Pointer(Pair((1, 2), (3, 4))[1]).contents.y
"""
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
    def with_default(self, items=[1], *, n=1): return items, n
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
def shown():
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

CASES: dict[str, tuple[dict[str, str], str, str, str]] = {
    "names bound, removed and new": (
        CONFIG, "import users_config as m", "(m.table, getattr(m, 'k', 0), getattr(m, 'new', 0))",
        "m.table = np.zeros(3); m.table[1] = 5; m.table = np.ones(2); m.k += 1; vars(m)['k'] = 5; del m.k; m.k = 3; "
        "m.new = [1]; m.new.append(2)",
    ),
    "in place, behind a function of the module": (
        CONFIG, "import users_config\nfrom users_config import read, settings", "(read(), users_config.settings)",
        "settings['lr'] = 5; settings['layers'].append(2); settings['rate'] = settings.pop('lr'); "
        "users_config.settings['layers'].append(3)",
    ),
    "imported in the body": (
        CONFIG, "def imported():\n    import users_config\n    return users_config.k, users_config.settings",
        "imported()", "import users_config; users_config.k = 7; users_config.settings['lr'] = 3",
    ),
    "names imported in the body": (
        CONFIG, "def imported():\n    from users_config import k, settings as s\n    return k, s", "imported()",
        "import users_config; users_config.k = 7; users_config.settings['layers'].append(3)",
    ),
    **{
        f"the module of {found}": (
            CONFIG, "import importlib, sys, users_config\nmodules = {'m': users_config}",
            f"getattr({found}, 'settings')",
            "users_config.settings['lr'] = 3; users_config.settings = [1]; users_config.settings.append(2)",
        )
        for found in ("modules['m']", "sys.modules['users_config']", "importlib.import_module('users_config')")
    },
    "function and table bound": (
        HELPERS, "import users_helpers as m\nfrom users_helpers import run\nrate = 5\ndef my_step(): return rate",
        "(m.run(), run())",
        "m.init(); m.init(2); m.table.append(3); m.step = my_step; rate = 6; m.step = lambda: 9; "
        "m.step.__code__ = (lambda: 8).__code__",
    ),
    "class, method and instance": (
        HELPERS, "import users_helpers as m\nfrom users_helpers import Layer\nlayer = Layer()",
        "(layer.run(), Layer().run(), m.layer.run())",
        "Layer.factor = 3; Layer.items.append(2); Layer.items = []; m.layer.w.append(2); m.layer.factor = 2; "
        "m.Layer.run = lambda self: ('mine', self.w); layer.w.append(3); m.Layer.run = lambda self: len(self.w)",
    ),
    "registry, closure, and what a function holds": (
        HELPERS, "import users_helpers as m", "(m.apply(), m.with_default(), m.count())",
        "m.registry['one'] = lambda: 1; m.registry['two'] = lambda: 2; m.with_default.rate = 3; "
        "m.with_default.__defaults__ = (7,); m.count.advance(); m.count.advance()",
    ),
    "a module's __getattr__": (
        HIDDEN, "import users_hidden", "users_hidden.k",
        "users_hidden._values['k'] = 5; users_hidden._values = {'k': 6}; users_hidden.k = 7",
    ),
    "submodules, one behind another": (
        PACKAGE, "import users_package\nfrom users_package import sub, user",
        "(users_package.sub.table, users_package.k, user.helper())",
        "sub.k = 2; sub.table.append(2); users_package.k = 3; sub.table = [7]; user.table.append(5)",
    ),
    "an object of the program in two modules": (
        PAIR, "import users_a, users_b\nmine = [1]", "(mine, users_a.table, users_b.read(), users_b.other)",
        "users_b.other = users_a.table; users_b.own.append(3); users_a.table = users_b.other = mine; mine.append(2); "
        "users_b.own = 5; users_b.other.append(3)",
    ),
    "nested class, enum": (
        CLASSES, "from users_classes import Config, Level",
        "(Config.Train().run(), Config.instance.run(), Level.HIGH.weight(), Level(1).name, getattr(Level, 'unit', 0))",
        "Config.Train.lr = 5; Config.Train.steps.append(2); Config.Train.run = lambda self: self.lr; "
        "Config.instance.lr = 7; Level.weight = lambda self: -self.value; Level.unit = [1]; Level.unit.append(2)",
    ),
    "what methods hold": (
        CLASSES, "from users_classes import Layer", "(Layer().size, Layer().decorated(), Layer().with_default())",
        "Layer.size.fget.unit = 'km'; Layer.decorated.by['k'] = 5; "
        "Layer.with_default.__defaults__[0].append(2); Layer.with_default.__defaults__ = ([3],)",
    ),
    "methods edited in place": (
        CLASSES, "from users_classes import Layer\nclass Sub(Layer): pass",
        "(Layer().run(), Sub().run(), Sub.fixed(), Sub.named(), Sub().size, Sub().decorated(), Sub.Inner().run(), "
        "Sub().with_default())",
        "Layer.run.__code__ = (lambda self: 11).__code__; Layer.fixed.__code__ = (lambda: 13).__code__; "
        "Layer.named.__func__.__code__ = (lambda cls: cls.__name__ * 2).__code__; "
        "Layer.size.fget.__code__ = (lambda self: 14).__code__; "
        "Layer.decorated.__wrapped__.__code__ = (lambda self: 16).__code__; "
        "Layer.Inner.run.__code__ = (lambda self: 17).__code__; Layer.with_default.__kwdefaults__['n'] = 2",
    ),
    "plain defaults": (
        {"users_defaults": DEFAULTS}, "import users_defaults as m",
        "(m.scaled(), m.Model().scaled(), m.Model.fixed(), m.Model.named(), len(m.scaled.__defaults__ or ()))",
        "m.scaled.__defaults__ = (5,); m.Model.scaled.__defaults__ = (6,); m.Model.fixed.__defaults__ = ('z',); "
        "m.Model.named.__func__.__defaults__ = (2.5,); m.Model.scaled.__kwdefaults__['b'] = 7; "
        "m.scaled.__kwdefaults__ = {'b': 8}; m.Model.scaled.__kwdefaults__ = {'b': True}; "
        "m.Model.scaled.__defaults__ = (True,)",
    ),
    "imported in a method": (
        {**CLASSES, "users_classes": CLASSES["users_classes"].replace(", users_parts\nclass", "\nclass")},
        "from users_classes import Layer", "Layer().late()",
        "import users_parts; users_parts.k = 5; users_parts.k = [6]; users_parts.k.append(7)",
    ),
    "patched and put back": (
        CLASSES, PUT_BACK, "shown()",
        "patch(); put_back(); patch(); put_back(); Layer.run, Layer.other = Layer.other, Layer.run; "
        "Layer.run, Layer.other = Layer.other, Layer.run",
    ),
    "beside what cannot be sent": (
        UNSENDABLE, "import users_lock", "users_lock.read()", "users_lock.k.append(2); users_lock.k = 5",
    ),
    "types that each import makes": (
        POINTS, "import users_points", "users_points.read()", "users_points.k = 2; users_points.k = 3",
    ),

    "the class of an object": (
        {"users_model": "k = 1\nclass Model:\n    def rate(self): return k\n"},
        "import users_model\nmodel = users_model.Model()", "model.rate()",
        "users_model.k = 2; users_model.k = 3; users_model.Model.rate = lambda self: 7",
    ),
}  # fmt: skip
"""The files of modules, a program, what its function reads, and lines that change that, one after the other.

Names of modules begin with ``users_`` and get a number, so that each program has its own.
"""

TWO_OBJECTS = ("an object of the program in two modules", "in place, behind a function of the module")
"""Cases with two objects in an inline runtime: its module is the program's, and what the function captured a copy."""
AS_IMPORTED = ("methods edited in place",)
"""Cases with code that is taken for that of the module's file when the runtime first meets it."""


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

    def edit(self, name: str, contents: str) -> Any:
        """Write another text into the file of a module and load it again. Return the module.

        Each text counts as written in another second: by that and the length Python tells whether the bytecode, which
        workers may have left beside the file, is that of the text.
        """
        module = sys.modules[self.own(name)]
        path = Path(module.__file__ or "")
        before = path.stat().st_mtime
        path.write_text(contents)
        os.utime(path, (before + 2, before + 2))
        return importlib.reload(module)

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


Programs = Callable[..., Program]


def of_case(program: Programs, name: str) -> Program:
    files, source, held, _ = CASES[name]
    return program(files, f"{source}\ndef reads(x): return [text({held})] * len(x)\n")


def changes_of(name: str) -> list[str]:
    return CASES[name][-1].split("; ")


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.storm)])
def test_what_is_changed_in_modules_reaches_the_workers(
    subtests: Any, shared_runtimes: Any, program: Programs, count: int
) -> None:
    """Each case with ``count`` moments of the first call, by all verbs and on all runtimes in turn."""
    verbs, moments = itertools.cycle(VERBS), ["before the changes", "after one", "after all"]
    for (number, name), shift in itertools.product(enumerate(CASES), range(count)):
        where, first_call = WORKERS[(number + shift) % 4], moments[(number + shift) % 3]
        if (name in AS_IMPORTED and first_call == "after all") or (name in TWO_OBJECTS and where == 0):
            continue
        with subtests.test(case=name, first_call=first_call, workers=where):
            rt, main, changes = shared_runtimes[where], of_case(program, name), changes_of(name)
            plain = main.names["reads"]
            f = rt.function(plain, outputs="gather")
            for number, change in enumerate(["pass", *changes]):
                main.run(change)
                if number >= {"before the changes": 0, "after one": 1, "after all": len(changes)}[first_call]:
                    for verb in (next(verbs), "call"):
                        got, want = VERBS[verb](rt, f, plain), plain(X)
                        assert got == want, f"{change}, by {verb}\n  got  {got[0]}\n  want {want[0]}"


def test_one_object_by_two_names_is_one_on_each_worker(shared_runtimes: Any, program: Programs) -> None:
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


def test_a_worker_that_was_started_again_has_the_modules_of_now(
    subtests: Any, runtime: Callable[..., Any], program: Programs
) -> None:
    """Whether they were changed before or after its end."""
    rt = runtime(2)
    mains = {name: of_case(program, name) for name in CASES}
    functions = {name: rt.function(main.names["reads"], outputs="gather") for name, main in mains.items()}
    for name in [*CASES][::2]:
        mains[name].run(changes_of(name)[0])
    for f in functions.values():
        f(X)
    for step in (0, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            harness.kill_and_wait(harness.pids(rt)[1])
            harness.pids(rt)
        for name, f in functions.items():
            if name in [*CASES][1::2]:
                mains[name].run(changes_of(name)[step])
            with subtests.test(case=name, step=step):
                assert f(X) == mains[name].names["reads"](X)


def test_what_a_rank_has_changed_in_a_module_stays_its_own(shared_runtimes: Any, program: Programs) -> None:
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


def test_an_argument_of_a_modules_class_has_the_methods_of_now(shared_runtimes: Any, program: Programs) -> None:
    """The function names neither the class nor its module."""
    main = of_case(program, "the class of an object")
    for rt in (shared_runtimes[2], shared_runtimes[0]):
        f = rt.function(lambda x, models: [models[0].rate()] * len(x), outputs="gather", bcast_inputs="models")
        for change in ["pass", *changes_of("the class of an object")]:
            main.run(change)
            model = main.names["model"]
            found = [*f(X, [model]), *f.submit(X, [model]).result(), *rt.map(lambda model: model.rate(), [model] * 3)]
            assert found == [model.rate()] * (2 * len(X) + 3)


class OnlyHere:
    """Can be pickled, and loaded in the process that made it alone."""

    def __reduce__(self) -> Any:
        return load_only_in, (os.getpid(),)


def load_only_in(pid: int) -> Any:
    if os.getpid() != pid:
        raise ValueError("made for another process")
    return OnlyHere()


def test_what_workers_cannot_load_into_a_module_is_told(
    shared_runtimes: Any, program: Programs, caplog: pytest.LogCaptureFixture
) -> None:
    main = program({"users_m": "k, thing = 1, None\n"}, "import users_m\ndef f(x): return users_m.k, users_m.thing")
    main.names["here"] = OnlyHere()
    main.run("users_m.thing, users_m.k = here, 2")
    f = shared_runtimes[2].function(main.names["f"], outputs="first")
    assert f(X) == (2, None)
    assert "made for another process" in caplog.text
    assert "keeps what its own import of a module has made" in caplog.text


def test_a_submodule_that_only_workers_have_imported_stays(shared_runtimes: Any, program: Programs) -> None:
    """What the program has removed from a package goes; what only the worker has imported into it does not."""
    source = "import users_p\ndef f(x):\n    import users_p.sub\n    return users_p.sub.k, hasattr(users_p, 'extra')"
    main = program({"users_p/__init__": "extra = 1\n", "users_p/sub": "k = 7\n"}, source)
    f = shared_runtimes[2].function(main.names["f"], outputs="first")
    assert f(X) == (7, True)
    main.run("del users_p.extra")
    assert f(X) == (7, False)


def test_a_reload_that_did_not_arrive_is_sent_again(shared_runtimes: Any, program: Programs) -> None:
    """The call that would bring it fails over something else that it captured."""
    source = "import users_m\nheld = []\ndef f(x): return [users_m.step() + len(held)] * len(x)"
    main = program({"users_m": "def step(): return 1\n"}, source)
    f = shared_runtimes[2].function(main.names["f"], outputs="gather")
    assert f(X) == [1] * len(X)
    main.edit("users_m", "def step(): return 100\n")
    main.names["held"].append(threading.Lock())
    with pytest.raises(synk.errors.SerializationError):
        f(X)
    main.names["held"][:] = [5]
    assert f(X) == [101] * len(X)


def test_functions_of_a_module_that_is_reloaded(rt: Any, program: Programs) -> None:
    """They are found by module and name, with other code and parameters; an array of their name is not taken.

    Also if the workers have only what synk makes of them.
    """
    source = (
        "import synk\ndef plain(x):\n    return x + 1\n@synk.function(outputs='gather')\ndef f(x):\n    return x - 1\n"
    )
    main = program({"users_m": source}, "import users_m\nfrom users_m import plain, f")
    fn = main.names["plain"]
    plain, repeated, verified = (rt.function(fn, outputs="gather") for _ in range(3))
    in_blocks = rt.function(fn, outputs="gather", reproducible=2)

    def check(expected: np.ndarray, *args: Any) -> None:
        for call in (plain, in_blocks, in_blocks.serial, lambda *args: repeated.repeat(2, *args)):
            np.testing.assert_array_equal(call(*args), expected)
        assert verified.verify(*args)

    check(X + 1, X)
    with synk.fork(2, backend="numpy"):
        f = main.names["f"]
        np.testing.assert_array_equal(f(X), X - 1)
        main.edit("users_m", source.replace("x - 1", "x - 2"))
        np.testing.assert_array_equal(f(X), X - 2)
        np.testing.assert_array_equal(f.submit(X).result(), X - 2)
        main.edit("users_m", source.replace("(x)", "(x, y)").replace("x + 1", "x + y").replace("x - 1", "x * y"))
        np.testing.assert_array_equal(f(X, X), X * X)
    check(2 * X, X, X)
    main.run("users_m.plain = np.arange(3)")
    check(2 * X, X, X)
