"""Files that are written as a whole or not at all, in the background if wanted.

The new contents lie beside the file, under its name and ``.part``, until they are complete and on the disk. Then they
take the name in one step of the file system. So a program that is killed at any instruction leaves the old file or the
new one. A lock on the part keeps two writers apart. A part that was left behind has no lock, so the next writer takes
it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import BinaryIO, TypeVar

State = TypeVar("State")

Path = str | os.PathLike[str]

_STEP_S = 0.02


class _Part:
    """The part of a file that is being written. Made when no other writer has one."""

    def __init__(self, path: Path) -> None:
        self._target = os.path.realpath(os.fspath(path))
        if os.path.exists(self._target) and not os.path.isfile(self._target):  # a device would lose its name
            raise ValueError(
                f"cannot write {os.fspath(path)!r}: got what is no regular file (a folder or a device), expected a "
                "file or a new name. Name a file in it or beside it."
            )
        self._path = f"{self._target}.part"
        self._descriptor = self._open()

    def _open(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _lock(descriptor)
                if self._is_at_its_name(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the last holder of the lock gave it the file's name, or removed it

    def _is_at_its_name(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def complete(self, write: Callable[[BinaryIO], object]) -> None:
        """Write the part and give it the file's name, or remove it if that fails."""
        try:
            with os.fdopen(self._descriptor, "wb", closefd=False) as file:
                file.truncate()
                write(file)
                file.flush()
                # In this order: after a crash of the machine, the name must not belong to contents that never came.
                os.fsync(self._descriptor)
                os.rename(self._path, self._target)
        except BaseException:
            self.remove()
            raise
        os.close(self._descriptor)
        folder = os.open(os.path.dirname(self._target), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # for the name
        finally:
            os.close(folder)

    def remove(self) -> None:
        if self._is_at_its_name(self._descriptor):  # otherwise it has just got the file's name
            os.unlink(self._path)
        # The lock goes with the descriptor, also if this process is killed. A writer that waits for it then finds that
        # the name is gone, and makes a part of its own.
        os.close(self._descriptor)


def _lock(descriptor: int) -> None:
    """Wait for the lock of a file. One wait in the kernel would not end for a signal that another thread gets."""
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_STEP_S)


def check(path: Path) -> None:
    """Raise what :func:`save` would raise for this path, before there is something to save."""
    _Part(path).remove()


def save(
    path: Path, take: Callable[[], State], write: Callable[[State, BinaryIO], object], *, wait: bool
) -> Future[None] | None:
    """Write what ``take`` returns to a file, as a whole or not at all.

    If this program or another one is writing the same file, this waits first. So the last one to save is the last one
    to be written.

    Parameters
    ----------
    path : path
    take : callable
        Returns what to write: a copy that nothing changes.
    write : callable
        ``write(taken, file)``.
    wait : bool
        True: return when the file is on the disk. False: return a future as soon as ``take`` has returned. A program
        does not end before its files are written.

    Raises
    ------
    ValueError
        If ``path`` is a folder or a device.
    """
    part = _Part(path)
    try:
        taken = take()
    except BaseException:
        part.remove()
        raise
    if wait:
        part.complete(lambda file: write(taken, file))
        return None
    saved: Future[None] = Future()
    saved.set_running_or_notify_cancel()

    def run() -> None:
        try:
            part.complete(lambda file: write(taken, file))
        except Exception as error:
            # Log it at once, since the future may never be asked.
            logging.getLogger("synk").error("%s was not saved: %s: %s", path, type(error).__name__, error)
            saved.set_exception(error)
        else:
            saved.set_result(None)

    try:
        threading.Thread(target=run, name="synk-save").start()
    except RuntimeError:  # the system refuses another thread, or the interpreter is ending
        run()
    return saved
