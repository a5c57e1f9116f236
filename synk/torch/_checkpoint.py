"""The checkpoints of ``Replicated.save``: one file of ``state_dict``s, generators and the number of steps.

It is written by ``torch.save`` and read by ``torch.load(weights_only=True)``, which runs no code from it. The
``state_dict``s are those of rank 0.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import optree
import torch

from synk._pure.generators import generator_states, restore_generators
from synk._wire.cell import cell
from synk.torch._state import is_module, parts_of

FORMAT = 2
_KEYS = {"format", "num_steps", "seed", "classes", "objects", "ranks", "generators"}


def rank_generators() -> dict[str, Any]:
    """Return the states of a rank's generators, but for torch's, which is seeded before each step."""
    states = {**generator_states(), "synk.comm": cell.worker.rng.bit_generator.state}
    states.pop("torch", None)
    return states


def plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return states of generators without arrays."""
    kind, key, *rest = states["numpy.random"]
    return {**states, "numpy.random": (kind, key.tolist(), *rest)}


def load_generators(states: dict[str, Any]) -> None:
    if "synk.comm" in states:
        cell.worker.rng.bit_generator.state = states["synk.comm"]
    restore_generators(states)


def check(state: Any, objects: Sequence[Any]) -> None:
    """Raise unless ``state`` is a checkpoint of such objects.

    Raises
    ------
    ValueError
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT or not state.keys() >= _KEYS:
        found = state.get("format") if isinstance(state, dict) else None
        raise ValueError(
            f"cannot load a state of replicated objects: got {'format ' + repr(found) if found else 'something else'}, "
            f"expected format {FORMAT}, as Replicated.state_dict() returns it. Files of another format need the synk "
            "that has written them; a model's own state_dict goes into model.load_state_dict."
        )
    classes = [type(obj).__name__ for obj in objects]
    is_alike = len(classes) == len(state["classes"]) and all(
        one == other for one, other, obj in zip(classes, state["classes"], objects) if not is_module(obj)
    )
    if not is_alike:
        raise ValueError(
            f"cannot load a state of replicated objects: got one of {', '.join(state['classes'])}, expected one of "
            f"{', '.join(classes)}. Replicate the same objects, in the same order, as the program that has saved them."
        )


def load_objects(objects: Sequence[Any], state: dict[str, Any]) -> None:
    """Bring all objects into their states, or none of them if one does not fit.

    Raises
    ------
    ValueError
        If an object and its state do not fit.
    """
    tables: Any = [vars(part) for part in parts_of(objects)]
    # Results of a forward pass, as torch.nn.utils.weight_norm keeps one, cannot be copied with their graphs.
    memo = {id(each): each.detach() for each in optree.tree_leaves(tables) if getattr(each, "grad_fn", None)}
    for those in (copy.deepcopy(objects, memo), objects):  # copies come first
        for obj, saved in zip(those, copy.deepcopy(state["objects"])):
            try:
                obj.load_state_dict(saved)
            except Exception as error:
                raise ValueError(
                    f"cannot load the state of {type(obj).__name__}: {str(error).rstrip('.')}. Replicate the same "
                    "objects, in the same order, as the program that has saved them."
                ) from error


def write(state: dict[str, Any], file: Any) -> None:
    """Write a checkpoint.

    Raises
    ------
    TypeError
        If a ``state_dict`` holds what only code can load.
    """
    trial = io.BytesIO()
    torch.save(optree.tree_map(_without_elements, state["objects"], none_is_leaf=True), trial)
    try:
        torch.load(io.BytesIO(trial.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"cannot save {', '.join(state['classes'])}: a state_dict holds what torch.load(weights_only=True) "
            f"refuses, expected tensors, numbers and texts. {error}"
        ) from error
    torch.save(state, file)


def _without_elements(leaf: Any) -> Any:
    return torch.empty(0, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


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
