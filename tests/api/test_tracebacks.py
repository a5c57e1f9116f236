"""What is printed of an error is short, and shows the user's own lines: of each frame of a worker its file, its line,
its name and its source, wherever the function was written.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import frames
from support.harness import PACKAGE_FOLDER, TESTS_FOLDER, outcomes, script

import synk
from synk._pure.tracebacks import frames_of, outline
from synk.errors import CallTimeout


def printed(call: Callable[[], Any]) -> list[str]:
    """Return the lines that a program would print which ends with the error of ``call``."""
    try:
        call()
    except Exception as error:
        return "".join(traceback.format_exception(error)).splitlines()
    raise AssertionError("it raises")


NUM_OWN = 0 if sys.version_info >= (3, 11) else 1
"""Lines of synk's own in what is printed: before Python 3.11 the frame that raises anew cannot be left out."""


def own_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if f"{synk.__path__[0]}/" in line]


def test_a_name_error_in_a_script_takes_ten_lines() -> None:
    result = script(
        """
        synk.fork(2, backend="numpy")

        @synk.function
        def loss(x):
            y = 2 * x
            return no_such_name(y)

        loss(np.ones(4))
        """
    ).check(returncode=1, stderr=None)
    # From Python 3.13 on the interpreter also marks the part of a line that is all of it.
    lines = [line for line in result.stderr.strip().splitlines() if not line or line.strip(" ~^")]
    assert len(lines) <= 10 + 2 * NUM_OWN, result.stderr
    assert "no_such_name(y)" in result.stderr and "loss(np.ones(4))" in result.stderr
    assert lines[-1] == "NameError: name 'no_such_name' is not defined"
    assert lines[0] == "synk.errors.RemoteError: on rank 0 of 2 (cpu:0) in 'loss', and likewise on 1 more:"


def fails(x: Any) -> float:
    raise KeyError("mine")


def adds(x: Any) -> Any:
    return synk.comm.all_reduce(np.ones(1 + synk.comm.rank))


def sleeps(x: Any) -> float:
    time.sleep(100)
    return 0.0


WRONG: dict[str, Callable[[synk.Runtime], Any]] = {
    "a call": lambda rt: rt.function(fails)(np.ones(4)),
    "serial": lambda rt: rt.function(fails).serial(np.ones(4)),
    "a result": lambda rt: rt.function(fails).submit(np.ones(4)).result(),
    "verify": lambda rt: rt.function(fails).verify(np.ones(4)),
    "stream": lambda rt: list(rt.function(fails).stream([np.ones(4)])),
    "map": lambda rt: list(rt.map(fails, range(3))),
    "Executor.map": lambda rt: list(synk.Executor(runtime=rt).map(fails, range(3))),
    "comm.all_reduce": lambda rt: rt.function(adds, outputs=None)(np.ones(4)),
    "an op, as a decorator": lambda rt: synk.function(outputs="mean")(fails),
    "an argument": lambda rt: rt.function(fails)(np.ones(4), 3),
    "an option": lambda rt: rt.function(fails)(np.ones(4), batch=-1.5),
    "a time limit": lambda rt: rt.function(sleeps)(np.ones(4), timeout=0.2),
    "data": lambda rt: rt.data([[1], [2, 3]]),
    "a value": lambda rt: setattr(rt.shared(np.ones(3)), "value", "a"),
    "a collective": lambda rt: synk.gather(3),
    "fork": lambda rt: synk.fork(-1),
}


def test_no_verb_shows_a_line_of_synk(rt: Any, subtests: pytest.Subtests) -> None:
    for verb, call in WRONG.items():
        with subtests.test(verb):
            lines = printed(lambda: call(rt))  # noqa: B023
            assert len(own_lines(lines)) <= 2 * NUM_OWN, lines
            if lines[-1] == "KeyError: 'mine'":
                assert any('raise KeyError("mine")' in line for line in lines), lines


INTERRUPTED = (
    "sleep(x)",
    "sleep.verify(x)",
    "sleep.submit(x).result()",
    "[sleep.submit(x) for _ in range(5)]",
    "list(sleep.stream([x]))",
    "list(synk.map(enter, [100] * 3))",
    "sleep.submit(data); data[:] = 2",
    "sleep.submit(x); variable.value",
    "sleep.submit(x); synk.resident([1])",
    "receive(x)",
)


def test_ctrl_c_shows_the_lines_of_the_program() -> None:
    shown = outcomes(
        """
        import itertools
        from support.harness import ctrl_c_when, waits_in_synk

        runtime = synk.fork(2, backend="numpy")
        x, data, variable = np.ones(4), synk.data(np.ones(4)), synk.shared(np.ones(3))
        numbers, entered = itertools.count(), ""

        def enter(x):
            open(entered, "w").close()
            time.sleep(100)

        sleep = synk.function(enter, outputs=None)
        receive = synk.function(lambda x: synk.comm.recv(0) if synk.comm.rank else enter(x), outputs=None)

        def case(statement):
            global entered
            entered = f"{__file__}.{next(numbers)}"
            passed = ["submit"] if ";" in statement else []
            code = compile(statement, "<statement>", "exec")  # of a text it would also end the program
            try:
                with ctrl_c_when(lambda: os.path.exists(entered) and waits_in_synk(*passed)):
                    exec(code, globals())
            finally:
                runtime.interrupt()  # what Ctrl-C in a submit has left in flight
        """,
        [(statement,) for statement in INTERRUPTED],
        flags=(),
    )
    for statement, text in shown.items():
        lines = [line for line in text.splitlines() if "/contextlib.py" not in line]
        assert lines[-1] == "KeyboardInterrupt", (statement, text)
        assert len(own_lines(lines)) <= 2 * NUM_OWN, (statement, text)
        assert not any("/lib/python" in line for line in lines), (statement, text)


def test_an_iterable_of_the_programs_keeps_its_lines(reused: Any) -> None:
    """Whatever it raises: what a call in it raised, and what it raises itself."""
    function = reused(2).function(fails)

    def own_batches() -> Any:
        yield np.ones(4)
        function(np.ones(4))

    lines = printed(lambda: list(reused(2).map(len, own_batches())))
    assert any("function(np.ones(4))" in line for line in lines), lines
    assert len(own_lines(lines)) <= 2 * NUM_OWN, lines


def test_frames_of_a_worker_are_those_of_the_program() -> None:
    own = f'  File "{synk.__path__[0]}/communicators/_shm.py", line 3, in send\n    pass\n'
    users = '  File "/known.py", line 7, in g\n    comm.send(x, 9)\n'
    text = f"Traceback (most recent call last):\n{users}{own}ValueError: cannot send: to 9\n"
    assert frames_of(text, "ValueError", "cannot send: to 9") == users.rstrip()
    unexpected = text.replace("ValueError: cannot send: to 9", "KeyError: 3")
    assert frames_of(unexpected, "KeyError", "3") == (users + own).rstrip()
    between = f"Traceback (most recent call last):\n{own}{users}KeyError: 3\n"
    assert frames_of(between, "KeyError", "3") == users.rstrip()


def test_an_error_of_many_indented_lines_arrives(shared_runtimes: Any) -> None:
    """A worker sends the last part of a long text, which may begin in the middle of a message."""
    lines = "\n".join(f"{'line':>60} {number}" for number in range(3000))

    def fail(x: Any) -> None:
        raise ValueError(f"wrong:\n{lines}")

    with pytest.raises(ValueError, match=r"(?s)wrong:.*line 2999"):
        shared_runtimes[2].function(fail, outputs=None)(np.ones(2))


def test_all_lines_are_shown_on_demand(reused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNK_FULL_TRACEBACK", "1")
    function = reused(2).function(fails)
    lines = printed(lambda: function(np.ones(4)))
    assert len(own_lines(lines)) > 3


def test_a_bug_of_our_own_keeps_its_lines() -> None:
    namespace: dict[str, Any] = {"__name__": "synk._made"}
    exec("def raises(error):\n    raise error", namespace)
    told = (CallTimeout("x"), KeyboardInterrupt(), ValueError("cannot call 'f': got 3, expected 4."))
    for error in (*told, ValueError("not enough values to unpack"), AttributeError("x")):
        with pytest.raises(type(error)) as caught:
            namespace["raises"](error)
        outline(caught.value)
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[1:] == ["raises"] * (error not in told), error


# ----- where the function was written

BEGIN = "import synk\n\nruntime = synk.fork(1, backend='numpy')\n\n"
REPORT = "from support.frames import differences\n\nprint(*differences(FORMS), sep='\\n', end='done\\n')\n\n"


def test_frames_of_functions_of_a_prompt() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), str(TESTS_FOLDER)])}
    program, command = BEGIN + frames.SOURCE + REPORT, [sys.executable, "-q", "-i"]
    prompt = subprocess.run(command, input=program, env=environment, capture_output=True, text=True, check=False)
    assert (prompt.returncode, prompt.stdout) == (0, "done\n") and "Error" not in prompt.stderr, prompt.stderr


def test_frames_of_functions_of_a_notebook() -> None:
    script(
        f"""
        from IPython.core.interactiveshell import InteractiveShell
        from ipykernel.compiler import XCachingCompiler

        InteractiveShell.compiler_class = XCachingCompiler
        shell = InteractiveShell.instance()
        shell.history_manager.enabled = False
        for cell in {[BEGIN, frames.SOURCE, REPORT]!r}:
            shell.run_cell(cell, store_history=True).raise_error()
        """,
        flags=(),
    ).check("done\n", stderr=None)


def test_frames_of_functions_of_a_script_of_modules_and_of_text(tmp_path: Path) -> None:
    """A module is sent by name, or with its contents: if it asks for that, was reloaded, or has no file to import."""
    for name in ("by_name", "by_value", "reloaded", "made_by_hand"):
        (tmp_path / f"frames_{name}.py").write_text(frames.SOURCE)
    modules = f"""
        import importlib, linecache, sys, types
        import cloudpickle
        from support.frames import SOURCE

        sys.path.insert(0, {str(tmp_path)!r})
        import frames_by_name, frames_by_value, frames_reloaded

        cloudpickle.register_pickle_by_value(frames_by_value)
        importlib.reload(frames_reloaded)
        made = types.ModuleType("made")
        exec(compile(SOURCE, {str(tmp_path / "frames_made_by_hand.py")!r}, "exec"), vars(made))
        typed = {{"__name__": "__main__"}}
        linecache.cache["<typed>"] = len(SOURCE), None, SOURCE.splitlines(True), "<typed>"
        exec(compile(SOURCE, "<typed>", "exec"), typed)
        for each in (*map(vars, (frames_by_name, frames_by_value, frames_reloaded, made)), typed):
            print(*differences(each["FORMS"]), sep="\\n", end=each["__name__"] + "\\n")
        """
    found = script(BEGIN + frames.SOURCE + REPORT + textwrap.dedent(modules))
    found.check("done\nframes_by_name\nframes_by_value\nframes_reloaded\nmade\n__main__\n")
