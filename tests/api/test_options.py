"""The options of ``synk.function``: shown where one looks for them, checked, and named where they are misspelt."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import synk


def test_help_and_editors_see_all_options_with_their_defaults() -> None:
    shown = inspect.signature(synk.function).parameters
    assert str(shown["outputs"]) == "outputs: 'Any' = 'avg'"
    assert {name: each.default for name, each in shown.items()} == {
        "fn": None, "bcast_inputs": (), "outputs": "avg", "updates": (), "framework": None, "per_rank": False,
        "reproducible": False, "retry": 0, "on_oom": "raise",
    }  # fmt: skip


def test_a_misspelt_option_is_named() -> None:
    for arguments in ((len,), ()):
        with pytest.raises(TypeError, match=r"got option 'ouputs', expected bcast_inputs.*Did you mean 'outputs'\?"):
            synk.function(*arguments, ouputs="sum")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "framework": ({"framework": "numpy"}, r"got framework='numpy', expected one of \(None, 'torch', 'jax'\)\."),
    "per_rank": ({"per_rank": 1}, "got per_rank=1, expected True or False."),
    "updates": ({"updates": [1]}, "got int in updates, expected what synk.shared or synk.resident made"),
    "retry": ({"retry": -1}, "got retry=-1, expected an integer of 0 or more."),
    "retry is no number": ({"retry": False}, "got retry=False, expected an integer of 0 or more."),
    "on_oom": ({"on_oom": True}, "got on_oom=True, expected 'raise' or 'slices'."),
    **{
        (name := f"reproducible={n}"): ({"reproducible": n}, f"got {name}, expected True, or the rows of a block.")
        for n in (0, -1, 2.5)
    },
    "blocks and ranks": (
        {"reproducible": 4, "per_rank": True},
        "got reproducible=4 with per_rank=, expected a function without: it is called for each block of rows.",
    ),
    "blocks and None": (
        {"reproducible": 4, "outputs": {"a": "sum", "b": (None, "avg")}},
        "got reproducible=4 with op None, expected an op for each output.",
    ),
    "blocks and slices": ({"reproducible": True, "on_oom": "slices"}, "got reproducible=True with on_oom=, expected"),
}


def test_a_value_that_does_not_fit_is_refused(subtests: pytest.Subtests) -> None:
    for name, (options, text) in REFUSED.items():
        with subtests.test(name), pytest.raises((TypeError, ValueError), match=f"^cannot build 'len': {text}"):
            synk.function(len, **options)


def test_what_changes_something_is_not_called_again(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for option, value in {"retry": 2, "on_oom": "slices", "reproducible": 4}.items():
        for changed in (shared_runtimes[2].shared(1.0), shared_runtimes[2].resident([])):
            with subtests.test(option), pytest.raises(ValueError, match=f"got {option}={value!r} with updates="):
                synk.function(len, updates=changed, **{option: value})
