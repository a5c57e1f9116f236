"""The checkpoints of ``Replicated.save``: the state of replicated objects, and each rank's own state.

A checkpoint is one dict of plain values (``_plain.py``), written by ``torch.save`` and read by
``torch.load(weights_only=True)``. The objects' states are those of rank 0. Whatever differs on another rank is stored
beside them: statistics of a batch norm over its own rows, gradients that were kept back, the generators of its process.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from synk._pure.generators import generator_states, restore_generators
from synk.torch import _state, _state_bytes
from synk.torch._plain import Plain, Restored

FORMAT = 1

Key = tuple[Any, ...]
"""The key of an entry in the objects' states: position of the object, part of its state, and a name in this part if the
part is a dict.
"""


# -- objects ----------------------------------------------------------------------------------------------------------


def plain_states(objects: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return copies of the objects' states as plain values, and the places of values that were left out."""
    maker = Plain(objects)
    states = []
    for obj in objects:
        name = type(obj).__name__
        states.append({"class": name, "state": maker.plain(_state.dump(obj), name)})
    return states, maker.left_out


def load_plain(objects: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
    """Bring all objects into their states, or none of them if one does not fit.

    Raises
    ------
    ValueError
        If an object and its state do not fit.
    """
    maker = Restored(objects)
    made = []
    if len(states) != len(objects):
        raise ValueError(_misfit("it", f"{len(states)} objects", f"{len(objects)} replicated objects"))
    for obj, saved in zip(objects, states):
        _check_fit(obj, saved)
        made.append(maker.restored(saved["state"], _state.dump(obj)))
    for obj, state in zip(objects, made):
        _state.load(obj, state)


def _check_fit(obj: Any, saved: dict[str, Any]) -> None:
    name = type(obj).__name__
    if _state.is_module(obj) != ("tensors" in saved["state"]) or (not _state.is_module(obj) and saved["class"] != name):
        raise ValueError(_misfit(name, f"a {saved['class']}", f"a {name}"))
    if not _state.is_module(obj):
        return
    own, tensors = dict(_state.tensors_of(obj)), saved["state"]["tensors"]
    for key in {**own, **tensors}:
        if key not in own or key not in tensors:
            raise ValueError(_misfit(name, f"{'no' if key in own else 'a'} tensor {key!r}", "the same names"))
        mine, its = own[key], tensors[key]
        is_parameter = isinstance(mine, torch.nn.Parameter)  # buffers may change their size
        if mine.dtype != its.dtype or (is_parameter and mine.shape != its.shape):
            raise ValueError(
                _misfit(f"{name}.{key}", f"{its.dtype} of shape {tuple(its.shape)}",
                        f"{mine.dtype} of shape {tuple(mine.shape)}")
            )  # fmt: skip


def _misfit(name: str, got: str, expected: str) -> str:
    return (
        f"cannot load the state of {name}: got {got}, expected {expected}. Replicate the same objects, in the same "
        "order, as the program that has saved them."
    )


# -- each rank's own state --------------------------------------------------------------------------------------------


def _entries(objects: Sequence[Any]) -> Iterator[tuple[Key, Any]]:
    """Yield the entries of the objects' states."""
    for number, obj in enumerate(objects):
        for part, value in _state.dump(obj).items():
            if isinstance(value, dict) and part in ("tensors", "gradients", "attributes") and _state.is_module(obj):
                yield from (((number, part, name), item) for name, item in value.items())
            else:
                yield (number, part), value


def digests(objects: Sequence[Any]) -> dict[Key, bytes]:
    """Return a checksum of each entry. Equal checksums mean equal values."""
    found = {}
    references = _state_bytes.references_to(objects)
    for key, value in _entries(objects):
        try:
            data = _state_bytes.dumps(value, references, [])
        except Exception:
            continue  # a value that cannot be pickled is in no checkpoint
        found[key] = hashlib.blake2b(data, digest_size=16).digest()
    return found


def own_entries(objects: Sequence[Any], keys: Sequence[Key]) -> list[tuple[Key, Any]]:
    """Return the entries ``keys`` as plain values."""
    maker = Plain(objects)
    wanted = set(keys)
    return [(key, maker.plain(value, "")) for key, value in _entries(objects) if key in wanted]


def load_own(objects: Sequence[Any], entries: Sequence[tuple[Key, Any]]) -> None:
    """Give objects the entries that are this rank's own. Their other entries stay."""
    maker = Restored(objects)
    dumped = [_state.dump(obj) for obj in objects]
    for (number, part, *name), value in entries:
        old = dumped[number][part][name[0]] if name else dumped[number][part]
        made = maker.restored(value, old)
        _state.load(objects[number], {part: {name[0]: made} if name else made})


# -- generators -------------------------------------------------------------------------------------------------------


def plain_generators(more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the states of this process's generators, and ``more``, as plain values."""
    return {name: Plain(()).plain(state, name) for name, state in {**generator_states(), **(more or {})}.items()}


def restored(plain: Any) -> Any:
    """Return a generator's state from its plain value in ``plain_generators``."""
    return Restored(()).restored(plain)


def load_generators(states: dict[str, Any]) -> None:
    restore_generators({name: restored(state) for name, state in states.items()})


# -- files ------------------------------------------------------------------------------------------------------------


def to_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a file that ``save`` wrote.

    Raises
    ------
    ValueError
        If the file is not a checkpoint, or is damaged.
    OSError
        If the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            if zipfile.ZipFile(file).testzip() is None:  # torch compares no checksums
                file.seek(0)
                return dict(torch.load(file, weights_only=True, map_location="cpu"))
            problem = "one whose checksums differ"
        except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
            line = str(error).partition("\n")[0].rstrip(".")
            problem = f"one that torch cannot read ({type(error).__name__}: {line})"
    raise ValueError(
        f"cannot load {os.fspath(path)!r}: got {problem}, expected a file that save() has written. It may be "
        "damaged, or something else."
    )


def check_format(state: Any) -> None:
    """Raise ValueError unless ``state`` is a dict that ``Replicated.state_dict`` returned."""
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT or not {"objects", "ranks", "num_steps", "seed", "generators"} <= set(state):
        raise ValueError(
            f"cannot load a state of replicated objects: got {'format ' + repr(found) if found else 'something else'}, "
            f"expected format {FORMAT}, as Replicated.state_dict() returns it. Files of a newer synk need that synk; "
            "a model's own state_dict goes into model.load_state_dict."
        )
