"""The recipes of the documentation, each against the same thing in plain torch; where a package is missing, skipped."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import synk

torch = pytest.importorskip("torch")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BEGINNING = re.search(r"^All recipes begin like this:\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
PACKAGES = {"torchmetrics": "torchmetrics", "A logger": "tensorboard"}


@pytest.fixture(scope="module")
def begun(kept_open: Any) -> Iterator[dict[str, Any]]:
    """Return the names of the beginning; its workers, which import torch, serve one recipe after the other."""
    threads = torch.get_num_threads()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(BEGINNING, "the beginning of recipes.md", "exec"), names)
    yield names
    synk.close()
    torch.set_num_threads(threads)


@pytest.fixture
def run(begun: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return what runs a recipe by its title, and returns its names."""

    def executed(title: str) -> dict[str, Any]:
        pytest.importorskip(PACKAGES.get(title, "torch"))
        names = dict(begun)
        exec(compile(BLOCKS[title], f"{title} of recipes.md", "exec"), names)
        return names

    return executed


def plain(names: dict[str, Any], batches: Any, objects: Any = None) -> tuple[list[float], Any]:
    """Train in this process; return the losses, and the objects."""
    objects = objects or names["make"]()
    return [float(names["step"](*objects, *rows).detach()) for rows in batches], objects


def slices(names: dict[str, Any], num_rows: int, end: int | None = None) -> list[Any]:
    x, y = names["x"][:end], names["y"][:end]
    return list(zip(x.split(num_rows), y.split(num_rows)))


def assert_same_weights(one: Any, other: Any) -> None:
    for (name, value), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(value.double(), expected.double(), rtol=0, atol=1e-12), name


def test_a_loader_with_workers(run: Any) -> None:
    names = run("A DataLoader with workers and pinned memory")
    loader = torch.utils.data.DataLoader(
        names["data"], batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    expected, (model, _) = plain(names, [rows for _ in range(2) for rows in loader])
    assert names["losses"] == pytest.approx(expected, abs=1e-12)
    assert len(expected) == 8
    assert_same_weights(names["model"], model)


def test_torchmetrics(run: Any) -> None:
    names = run("torchmetrics")
    model, optimizer = names["make"]()
    scores = []
    for rows, labels in slices(names, 64):
        names["step"](model, optimizer, rows, labels)
        with torch.no_grad():
            scores.append(model(rows))
    metrics = pytest.importorskip("sklearn.metrics")
    scores = torch.cat(scores).softmax(1)
    assert float(names["found"]["accuracy"]) == pytest.approx(metrics.accuracy_score(names["y"], scores.argmax(1)))
    assert float(names["found"]["auroc"]) == pytest.approx(metrics.roc_auc_score(names["y"], scores[:, 1]), abs=1e-6)


def test_a_learning_rate_finder(run: Any) -> None:
    names = run("A learning-rate finder")
    objects = names["make"]()
    expected = []
    for number, rate in enumerate(names["rates"][: len(names["losses"])]):
        objects[1].param_groups[0]["lr"] = rate
        rows = torch.arange(64 * number, 64 * (number + 1)) % 203
        expected += plain(names, [(names["x"][rows], names["y"][rows])], objects)[0]
    assert names["losses"] == pytest.approx(expected, abs=1e-9)
    assert len(expected) > 10
    assert_same_weights(names["model"], names["make"]()[0])  # as before the search
    assert names["rep"].num_steps == 0
    assert not names["optimizer"].state
    assert names["optimizer"].param_groups[0]["lr"] in names["rates"]


def test_early_stopping(run: Any) -> None:
    names = run("Early stopping")
    objects = names["make"]()
    best, best_epoch = float("inf"), 0
    for epoch in range(50):
        plain(names, slices(names, 32, 140)[:5], objects)
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(objects[0](names["x"][140:]), names["y"][140:]))
        if loss < best - 1e-2:
            best, best_epoch, kept = loss, epoch, copy.deepcopy(objects[0])
        elif epoch - best_epoch >= 3:
            break
    assert (names["best_epoch"], names["epoch"]) == (best_epoch, epoch)
    assert 0 < best_epoch < 49
    assert names["best"] == pytest.approx(best, abs=1e-12)
    assert_same_weights(names["model"], kept)


def test_averages_of_the_weights(run: Any) -> None:
    names = run("Averages of the weights: EMA and SWA")
    objects = names["make"]()
    ema = names["AveragedModel"](objects[0], multi_avg_fn=names["get_ema_multi_avg_fn"](0.95))
    for rows in slices(names, 32):
        plain(names, [rows], objects)
        ema.update_parameters(objects[0])
    assert_same_weights(names["ema"], ema)
    with torch.no_grad():
        assert torch.allclose(names["averaged"], ema(names["x"]), rtol=0, atol=1e-12)


def test_gradient_checkpointing(run: Any) -> None:
    names = run("Gradient checkpointing")
    torch.manual_seed(0)
    model = names["Deep"]().double()
    model.forward = lambda x: model.head(_through(model.blocks, x))
    expected, _ = plain(names, slices(names, 32), (model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    assert names["losses"] == pytest.approx(expected, abs=1e-12)


def _through(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = torch.tanh(block(x))
    return x


def test_a_logger(run: Any) -> None:
    names = run("A logger")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(names["folder"]).Reload()
    expected, _ = plain(names, slices(names, 32))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(expected, abs=1e-6)
    assert [event.step for event in events.Scalars("loss")] == list(range(7))
    assert len(events.Histograms("weights")) == 1
    assert len(os.listdir(names["folder"])) == 1


def test_recipes_are_short_and_their_new_lines_are_counted() -> None:
    """Three lines make the loop a parallel one; the table says how many a recipe has besides."""
    rows = re.findall(r"^\| ([^|]+) \| (\d)[^|]* \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)
    beside = [int(number) for _, number in rows]
    found = [block.count("# new") - 3 for block in BLOCKS.values()]
    assert found == beside, dict(zip(BLOCKS, found))
    assert len(BLOCKS) == 7
    assert all(len(block.splitlines()) <= 30 for block in BLOCKS.values())


def test_every_recipe_has_a_test() -> None:
    tested = re.findall(r'run\("([^"]+)"\)', Path(__file__).read_text(encoding="utf-8"))
    assert sorted(tested) == sorted(BLOCKS)
