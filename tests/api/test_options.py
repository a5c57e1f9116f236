"""The options of ``synk.function``: shown where one looks for them, and a misspelt one is named. No process."""

from __future__ import annotations

import inspect

import pytest

import synk
from synk._api.composed import Composed
from synk._api.function import Function
from synk._api.options import FunctionOptions


def test_help_and_editors_see_all_options_with_their_defaults() -> None:
    shown = inspect.signature(synk.function).parameters
    told = inspect.signature(Function.__init__).parameters | inspect.signature(Composed.__init__).parameters
    assert list(shown) == ["fn", *FunctionOptions.__annotations__]
    assert all(shown[name].default == told[name].default for name in FunctionOptions.__annotations__)


def test_a_misspelt_option_is_named() -> None:
    for arguments in ((len,), ()):
        with pytest.raises(TypeError, match=r"got option 'ouputs', expected bcast_inputs.*Did you mean 'outputs'\?"):
            synk.function(*arguments, ouputs="sum")  # type: ignore[call-overload]
