"""Tracebacks of workers name the file, the line and the source of each frame, wherever the function was written."""

from __future__ import annotations

from pathlib import Path

from support import frames
from support.harness import script

BEGIN = "import synk\n\nruntime = synk.fork(2, backend='numpy')\n\n"
REPORT = "from support.frames import differences\n\nprint(*differences(FORMS), sep='\\n', end='done\\n')\n\n"
PROGRAM = BEGIN + frames.SOURCE + REPORT


def test_of_a_script() -> None:
    script(PROGRAM).check("done\n")


def test_of_a_prompt() -> None:
    script(
        f"""
        import subprocess

        prompt = subprocess.run([sys.executable, "-q", "-i"], input={PROGRAM!r}, capture_output=True, text=True)
        assert prompt.returncode == 0 and "Error" not in prompt.stderr, prompt.stderr
        print(prompt.stdout, end="")
        """,
        flags=(),
    ).check("done\n")


def test_of_a_notebook() -> None:
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


def test_of_modules_and_of_text(tmp_path: Path) -> None:
    """A module is sent by name, or with its contents: if it asks for that, was reloaded, or has no file to import."""
    for name in ("by_name", "by_value", "reloaded", "made_by_hand"):
        (tmp_path / f"frames_{name}.py").write_text(frames.SOURCE)
    script(
        f"""
        import importlib, linecache, sys, types
        import cloudpickle
        from support.frames import SOURCE, differences

        sys.path.insert(0, {str(tmp_path)!r})
        import frames_by_name, frames_by_value, frames_reloaded

        cloudpickle.register_pickle_by_value(frames_by_value)
        synk.fork(2, backend="numpy")
        importlib.reload(frames_reloaded)
        made = types.ModuleType("made")
        exec(compile(SOURCE, {str(tmp_path / "frames_made_by_hand.py")!r}, "exec"), vars(made))
        typed = {{"__name__": "__main__"}}
        linecache.cache["<typed>"] = len(SOURCE), None, SOURCE.splitlines(True), "<typed>"
        exec(compile(SOURCE, "<typed>", "exec"), typed)
        for each in (*map(vars, (frames_by_name, frames_by_value, frames_reloaded, made)), typed):
            print(*differences(each["FORMS"]), sep="\\n", end=each["__name__"] + "\\n")
        """
    ).check("frames_by_name\nframes_by_value\nframes_reloaded\nmade\n__main__\n")
