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

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^### ([^\n]+)\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BEGINNING = re.findall(r"All recipes begin like this:\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
PACKAGES = {"torchmetrics": "torchmetrics", "A logger": "tensorboard"}


def test_recipes_run(subtests: Any, kept_open: Any) -> None:
    threads, begun = torch.get_num_threads(), {"__name__": "__main__"}
    try:
        exec(compile(BEGINNING, "the beginning of evaluation.md", "exec"), begun)
        for title, block in BLOCKS.items():
            if importlib.util.find_spec(PACKAGES.get(title, "torch")) is None:
                continue
            with subtests.test(recipe=title):
                names: dict[str, Any] = dict(begun)
                exec(compile(block, f"{title} of evaluation.md", "exec"), names)
                if title == "EMA and SWA":
                    model, *others = names["make"]()
                    for rows in zip(names["x"].split(32), names["y"].split(32)):
                        names["step"](model, *others, *rows)
                    assert differences(model.state_dict(), names["model"].state_dict(), 1e-12) == []
    finally:
        synk.close()
        torch.set_num_threads(threads)
