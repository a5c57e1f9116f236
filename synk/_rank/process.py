"""What a rank does to its process: output, memory, the debugger, and exceptions that hold frames."""

from __future__ import annotations

import faulthandler
import io
import linecache
import os
import resource
import signal
import sys
from types import CodeType, FrameType
from typing import Any, NoReturn


def prepare(stacks_fd: int) -> None:
    """Make errors, stacks and output of this process useful to the program."""
    # The stack of C would push the lines of Python out of the error.
    options = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(**options)
    # Python 3.13 and later would show lines of the bootstrap under any frame of a text that was run with exec.
    vars(linecache).get("_interactive_cache", linecache.cache).clear()
    # This answers even while C code holds the interpreter: where() must explain a worker that is stuck.
    faulthandler.register(signal.SIGUSR2, file=stacks_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")


def take_over(setup: dict[str, Any]) -> None:
    """Let the user's code find the program's arguments and import path, and no terminal."""
    if not os.environ.get("PYTHONBREAKPOINT"):  # else the user has chosen a debugger, or none
        sys.breakpointhook = _refuse_breakpoint
    sys.path[:] = setup["sys_path"]
    sys.argv[:] = setup["argv"]


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "cannot stop at breakpoint(): got there on a worker, which has no terminal. "
        "Run the program with synk.fork(0): the function then runs in its own process."
    )


def flush_output() -> None:
    """Flush what was printed, so that it reaches the program."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the user's function may have closed or replaced it: that must not end the worker
            continue


def end_copy(error: BaseException | None = None) -> NoReturn:
    """End a child that a function has forked, as Python ends a program that has raised ``error``, or nothing."""
    from synk._pure.tracebacks import of_the_program  # workers need it nowhere else

    status = 1
    try:
        code = error.code if isinstance(error, SystemExit) else error
        if code is None or isinstance(code, int):
            status = (code or 0) & 0xFF
        elif isinstance(code, BaseException):
            BaseException.with_traceback(code, of_the_program(code.__traceback__))
            sys.excepthook(type(code), code, code.__traceback__)
        else:
            print(code, file=sys.stderr)
        flush_output()
    finally:
        os._exit(status)


def prefer_for_oom() -> None:
    """When memory runs out, let the kernel kill a worker, which can be replaced, rather than the user's session."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = int(file.read())
            file.write(str(min(score + 300, 1000)))
    except OSError:  # /proc is read-only in some containers: the kernel then chooses by itself
        pass


def resident_nbytes() -> int:
    """Return the resident memory of this process in bytes. The error text shows it if the process is killed."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # out of descriptors: a report is not worth a failed call
        return 0


def must_go_on(frame: FrameType | None, outermost: CodeType) -> bool:
    """Whether the action that a frame belongs to is importing a module, or runs a finalizer.

    A library of compiled code that is broken off while it is imported cannot be imported again in the same process
    (torch then ends it, or stays without some of its names). So the import is done to its end. If that takes too long,
    the program kills this process, and a new one can import it. An import that the ``outermost`` code of an action
    itself runs in, as in a frozen program, does not count. What a finalizer raises is lost, and what it was to release
    stays.
    """
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def drop_frames(error: BaseException) -> None:
    """Unlink an exception from the frames it went through, so that their arrays are freed now."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        item = pending.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        BaseException.with_traceback(item, None)  # not by assignment: an exception's class may be frozen
        pending += [item.__cause__, item.__context__]
