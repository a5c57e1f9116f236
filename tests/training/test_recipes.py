"""The recipes of the documentation run, and learn what the same loops learn in plain torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from trainings import differences

import synk

torch = pytest.importorskip("torch")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BEGINNING = re.findall(r"^All recipes begin like this:\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
PACKAGES = {"torchmetrics": "torchmetrics", "A logger": "tensorboard"}


def plain(names: dict[str, Any], num_rows: int) -> tuple[list[float], Any]:
    """Train in this process on slices of the rows; return the losses, and the model."""
    objects = names["make"]()
    rows = zip(names["x"].split(num_rows), names["y"].split(num_rows))
    return [float(names["step"](*objects, *each).detach()) for each in rows], objects[0]


def test_recipes_run_and_are_short(subtests: Any, kept_open: Any) -> None:
    """Three lines make the loop a parallel one; the table says how many a recipe has besides."""
    beside = [int(number) for number in re.findall(r"^\| [^|]+ \| (\d)[^|]* \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)]
    assert [block.count("# new") - 3 for block in BLOCKS.values()] == beside and len(BLOCKS) == 7
    threads, begun = torch.get_num_threads(), {"__name__": "__main__"}
    try:
        exec(compile(BEGINNING, "the beginning of recipes.md", "exec"), begun)
        for title, block in BLOCKS.items():
            with subtests.test(recipe=title):
                assert len(block.splitlines()) <= 30
                if importlib.util.find_spec(PACKAGES.get(title, "torch")) is None:
                    continue
                names: dict[str, Any] = dict(begun)
                exec(compile(block, f"{title} of recipes.md", "exec"), names)
                if title == "Averages of the weights: EMA and SWA":
                    assert differences(plain(names, 32)[1].state_dict(), names["model"].state_dict(), 1e-12) == []
                if title == "A logger":
                    assert differences(plain(names, 32)[0], names["losses"], 1e-6) == []
                if title == "A learning-rate finder":  # as before the search
                    assert names["rep"].num_steps == 0 and not names["optimizer"].state
                if title == "Early stopping":
                    assert 0 < names["best_epoch"] < 49
    finally:
        synk.close()
        torch.set_num_threads(threads)
