"""The guard against wasteful transfers: arrays that each call copies although they have not changed.

An array is suspected if some samples of it are unchanged, and then compared in full. For this its bytes are kept from
the second call with equal samples on, until they differ. So an array that changes costs only its samples.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from synk._master.processes.output import report, warn_at_users_line
from synk._pure.trees import leaves_of
from synk.errors import TransferRefused, WastefulTransfer

MODES = ("allow", "log", "warn", "raise")

GUARDED_NBYTES = 1 << 16
"""Smaller arrays are not examined."""

TOLD_NBYTES = 1 << 24
"""From this size on a line in the log reports them even if all transfers are allowed."""

_NUM_SAMPLES = 64
_ACT_AT = 2
"""How many comparisons in full must succeed: then the last three calls are known to have had the same bytes."""


class Guard:
    """The guard of one runtime: a mode for all threads, and possibly another for a single thread.

    Parameters
    ----------
    mode : str
    followers : list of callable
        The runtime's; see ``Session.followers``. The guard is among them while it does more than write a line in the
        log, for any thread.
    """

    def __init__(self, mode: str, followers: list[Any]) -> None:
        self._default = check_mode(mode)
        self._of_thread = threading.local()
        self._followers = followers
        self._results: dict[int, Any] = {}
        if mode != "allow":
            followers.append(self.follow)

    @property
    def mode(self) -> str:
        """The mode for this thread."""
        return getattr(self._of_thread, "mode", self._default)

    @contextmanager
    def as_mode(self, mode: str) -> Iterator[None]:
        """Use another mode for this thread. ``"count"`` only counts what was unchanged."""
        before = getattr(self._of_thread, "mode", None)
        self._of_thread.mode = mode if mode == "count" else check_mode(mode)
        self._followers.append(self.follow)
        try:
            yield
        finally:
            self._followers.remove(self.follow)
            if self.follow not in self._followers:
                self._results.clear()
            if before is None:
                del self._of_thread.mode
            else:
                self._of_thread.mode = before

    def follow(self, session: Any, launched: Any, result: Any, heard_ns: int, ended_ns: int) -> None:
        """Remember the large arrays that a call returned, as long as the program holds them."""
        for leaf in leaves_of(launched.assembly.structure, result):
            if isinstance(leaf, np.ndarray) and leaf.nbytes >= GUARDED_NBYTES:
                self._results[id(leaf)] = launched.function.name, weakref.ref(leaf, partial(self._forget, id(leaf)))

    def _forget(self, number: int, _: Any) -> None:
        self._results.pop(number, None)

    def origin_of(self, value: Any) -> str:
        """Return the function that returned an array; empty if unknown."""
        name, ref = self._results.get(id(value), ("", None))
        return name if ref is not None and ref() is value else ""


def check_mode(mode: Any) -> str:
    """Return the mode of a guard, or raise ``ValueError``."""
    if mode not in MODES:
        raise ValueError(f"cannot guard transfers: got {mode!r}, expected one of {', '.join(map(repr, MODES))}.")
    return str(mode)


class _Seen:
    """The record of the array that was last passed under one label."""

    __slots__ = ("copy", "count", "samples")

    def __init__(self, samples: bytes) -> None:
        self.samples = samples
        self.copy: bytes | None = None
        self.count = 0


class Copies:
    """The large arrays that one function is passed, and how often they were unchanged.

    Parameters
    ----------
    name : str
        Name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[str, _Seen] = {}
        self._ignored: set[str] = set()
        self._told: set[str] = set()
        self._is_logged = False

    def ignore(self, labels: Iterable[str]) -> None:
        """Never report these labels: ``synk.data`` would not help."""
        self._ignored.update(labels)

    def compare(self, guard: Guard, unchanged: dict[str, int], label: str, value: np.ndarray) -> None:
        """Compare an array that is about to be copied with that of the calls before.

        Raises
        ------
        TransferRefused
            If the guard refuses it. Nothing has been sent.
        """
        mode = guard.mode
        if label in self._ignored or (mode == "allow" and (self._is_logged or value.nbytes < TOLD_NBYTES)):
            return
        origin = guard.origin_of(value) if mode != "allow" else ""
        if origin:
            self._act(
                mode, label, f"{_size(value)}, is the result of {origin!r}, and is sent back to the workers", False
            )
            return
        samples = value.flat[:: max(value.size // _NUM_SAMPLES, 1)].tobytes()
        seen = self._seen.get(label)
        if seen is None or seen.samples != samples:
            if seen is not None and mode == "allow":  # it changes, so the copy is needed
                self._ignored.add(label)
            self._seen[label] = _Seen(samples)
            return
        if seen.copy is None or not _equals(seen.copy, value):
            seen.copy, seen.count = value.tobytes(), 0
            return
        seen.count += 1
        unchanged[label] = unchanged.get(label, 0) + 1
        if seen.count >= _ACT_AT:
            how = f"{_size(value)}, is copied at every call, and its bytes were the same in {seen.count + 1} calls"
            self._act(mode, label, how, True)
            if mode == "allow":
                self._seen.clear()

    def _act(self, mode: str, label: str, how: str, is_copy: bool) -> None:
        cure = (
            f"synk.data({label}) is copied once; where it does change, write into a Data: d[:] = {label}"
            if is_copy
            else "keep it on the ranks in a synk.shared variable, or in a synk.resident object"
        )
        text = f"{label} of {self._name!r}, {how}. If that is not meant: {cure}."
        if mode == "count":
            return
        if mode == "raise":
            raise TransferRefused(f'refused a transfer: {text} Nothing was sent; transfer_guard("allow") lets it pass.')
        if mode == "allow":
            self._is_logged = True
        elif label in self._told:
            return
        self._told.add(label)
        if mode == "warn":
            warn_at_users_line(text, WastefulTransfer)
        else:
            report("%s", text)


def _equals(copy: bytes, value: np.ndarray) -> bool:
    """Whether an array has these bytes. A contiguous array is compared without a copy."""
    raw = value.data if value.flags.c_contiguous else value.tobytes()
    return len(copy) == value.nbytes and copy.startswith(raw)


def _size(value: np.ndarray) -> str:
    return f"{value.nbytes / 1e6:.2g} MB" if value.nbytes < 1e8 else f"{value.nbytes / 1e6:.0f} MB"
