"""The examples of the README and of the documentation run, and print what the text says.

So does the code within the lines and tables of the README and of the how-to page. Each piece stands, as it is written,
in a program below, where ``...`` is whatever the program has there. So a piece that is new on a page fails here until
there is a program for it.
"""

from __future__ import annotations

import doctest
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.harness import start_polars
from support.nursery_process import IMPORTS
from support.talking import VERBS, check_on_one_rank, talks

import synk
from synk._wire.cell import cell

start_polars()

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def pages_with_examples() -> list[Path]:
    """Return the pages, without those that repeat what another one has."""
    found, known = [], set()
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if not known.issuperset(blocks := BLOCK.findall(text)):
            found.append(path)
        known.update(blocks)
    return found


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Return the names of the functions in which ranks talk, as they are called; each also runs on one rank then.

    All but those that change what their ranks keep, with which the page goes on.
    """
    found: set[str] = set()
    call = synk.Function.__call__

    def checked(self: synk.Function, /, *args: Any, **kwargs: Any) -> Any:
        if talks(self) and "batch" not in kwargs:  # else repeat calls it, which makes many runs of it
            found.add(self.__name__)
            if not self._callee.changes:
                return check_on_one_rank(self, call, args, kwargs)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(synk.Function, "__call__", checked)
    yield found
    synk.close()


IMPORTED = {"calls": "sklearn.model_selection", "howto": "sklearn.ensemble pandas"}
"""What the two workers of a page would import, each for itself."""


@pytest.mark.parametrize("path", pages_with_examples(), ids=lambda path: path.stem)
def test_examples_run(path: Path, talking: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share a namespace: ``python`` blocks are executed, ``pycon`` blocks are compared.

    Functions in which ranks talk run serially and with one row as well.
    """
    monkeypatch.setenv(IMPORTS, IMPORTED.get(path.stem, ""))
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    report: list[str] = []
    for block in BLOCK.finditer(text):
        kind, source = block.groups()
        line = text.count("\n", 0, block.start()) + 1
        if kind == "python":
            exec(compile("\n" * line + source, str(path), "exec"), namespace)
            continue
        example = doctest.DocTestParser().get_doctest(source, namespace, path.stem, str(path), line)
        runner.run(example, out=report.append, clear_globs=False)
        namespace = example.globs
    assert runner.failures == 0, "".join(report)
    assert talking == TALKING.get(path.stem, set())


TALKING = {
    "calls": set(),  # by repeat
    "checkpoints": set(),  # by repeat
    "communication": {"smooth", "moments", "forces", "pipeline", "all_wait"},
    "data": {"note"},
    "debugging": {"waits"},
    "errors": {"shifted"},
    "evaluation": set(),  # in a step of replicate
    "parallel": {"standardised"},
    "profiling": {"work"},
}
"""The functions of each page in which ranks talk."""

TALK = re.compile(rf"\b(comm|torch|flow)\.({'|'.join(VERBS)})\(")


def test_the_pages_that_talk_are_known() -> None:
    blocks = {path.stem: BLOCK.findall(path.read_text(encoding="utf-8")) for path in PAGES}
    assert {name for name, found in blocks.items() if any(TALK.search(block[1]) for block in found)} == set(TALKING)


def test_a_function_that_changes_what_ranks_keep_runs_on_one_rank(current: synk.Runtime) -> None:
    (source,) = (each for _, each in BLOCK.findall((ROOT / "docs" / "data.md").read_text()) if "def note(" in each)
    namespace: dict[str, Any] = {"np": np, "synk": synk}
    exec(source, namespace)
    check_on_one_rank(namespace["note"], synk.Function.__call__, (np.arange(4.0),), {})


def test_no_box_of_a_page_ends_with_an_empty_line() -> None:
    """A reader sees it as output."""
    found = {
        path.name: re.findall(r"^```\w+\n(?:(?!```).*\n)*\n```$", path.read_text(), re.MULTILINE) for path in PAGES
    }
    assert not any(found.values()), found


# ----- code within lines

PAGES_WITH_PIECES = (ROOT / "README.md", ROOT / "docs" / "howto.md")

PROGRAMS = {
    "fork": "assert synk.fork",
    "function": "assert synk.function",
    "synk.distribute()": "synk.distribute()",
    "synk.fork(check=True)": """
        from synk._wire.cell import cell
        cell.runtime = cell.session = None
        runtime = synk.fork(check=True)
        try:
            with pytest.warns(RuntimeWarning, match="differ"):
                synk.function(np.mean, outputs="sum")(x)
        finally:
            runtime.close()
        """,
    "Data": "assert isinstance(synk.data(x), synk.Data)",
    '"avg"': 'assert np.isclose(synk.function(np.mean, outputs="avg")(x), x.mean())',
    '"sum"': 'assert synk.function(np.sum, outputs="sum")(x) == x.sum()',
    '"prod"': 'assert np.isclose(synk.function(np.prod, outputs="prod")(x + 1), (x + 1).prod())',
    '"min"': 'assert synk.function(np.min, outputs="min")(x) == x.min()',
    '"max"': 'assert synk.function(np.max, outputs="max")(x) == x.max()',
    '"first"': 'assert synk.function(lambda x: 5, outputs="first")(x) == 5',
    "f.verify(x)": "assert f.verify(x)",
    "Pool.map": """
        from multiprocessing.pool import Pool, ThreadPool  # of threads: the function here cannot be pickled
        with ThreadPool(2) as pool:
            found = Pool.map(pool, f.__wrapped__, np.split(x, 4))
        assert (np.concatenate(found) == f(x)).all()
        """,
    "@synk.function": """
        @synk.function
        def mean(x):
            return x.mean()
        assert np.isclose(mean(x), x.mean())
        """,
    "joblib.Parallel(n_jobs=...)": """
        import joblib
        assert joblib.Parallel(n_jobs=1)(joblib.delayed(g)(item) for item in items) == list(map(g, items))
        """,
    "synk.map(f, items)": "f = g; assert list(synk.map(f, items)) == list(map(f, items))",
    'backend="synk"': """
        import joblib
        calls = [joblib.delayed(g)(item) for item in items]
        assert joblib.Parallel(n_jobs=2, backend="synk")(calls) == list(map(g, items))
        with joblib.parallel_config(backend="synk"):
            assert joblib.Parallel()(calls) == list(map(g, items))
        """,
    "synk.torch.replicate(model, optimizer)": """
        rep = synk.torch.replicate(model, optimizer)
        @rep.function
        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss
        alone = torch.nn.functional.mse_loss(model(rows), targets).item()
        assert np.isclose(step(rows, targets).item(), alone)
        """,
    "synk.comm": """
        ranks = synk.function(lambda x: np.full(len(x), synk.comm.rank), outputs="gather")
        assert set(ranks(x)) == {0, 1}
        """,
    "replicate": "assert synk.torch.replicate",
    "synk.torch.DataParallel(model)": """
        expected = model(rows)
        model = synk.torch.DataParallel(model)
        assert torch.allclose(model(rows), expected)
        """,
    "batch=": "total = synk.function(np.sum, outputs='sum'); assert total(x, batch=3) == x[:3].sum()",
    "stream": "assert [*f.stream([x])][0].tolist() == f(x).tolist()",
    '"gather"': 'gathered = synk.function(lambda x: x, outputs="gather"); assert (gathered(x) == x).all()',
    'table["price"].to_numpy()': """
        total = synk.function(lambda price: price.sum(), outputs="sum")
        assert np.isclose(total(table["price"].to_numpy()), table["price"].sum())
        """,
    "synk.Executor": """
        with synk.Executor() as executor:
            assert executor.submit(g, "ab").result() == g("ab")
        """,
    "map": """
        with synk.Executor() as executor:
            assert list(executor.map(g, items)) == list(map(g, items))
        """,
    "synk.map": "assert list(synk.map(g, items)) == list(map(g, items))",
    "synk.current()": "assert list(synk.current().map(g, items)) == list(map(g, items))",
    "dask.config.set(scheduler=executor)": """
        dask = pytest.importorskip("dask")
        with synk.Executor() as executor, dask.config.set(scheduler=executor):
            assert dask.compute(*[dask.delayed(g)(item) for item in items]) == tuple(map(g, items))
        """,
    "loop.run_in_executor(executor, f, x)": """
        import asyncio
        async def there(f, x):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(executor, f, x)
        with synk.Executor() as executor:
            assert asyncio.run(there(g, "ab")) == g("ab")
        """,
    "synk.function": "assert synk.function(lambda x: x.sum(), outputs='sum')(x) == x.sum()",
    "progress=True": """
        pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # else a thread stays
        assert list(synk.map(g, items, progress=True)) == list(map(g, items))
        """,
}

NO_PROGRAMS = {
    "mpiexec": "a command",
    "torchrun": "a command",
    "make docs": "a command",
    "make demo": "a command",
    "tqdm": "the name of a distribution",
    "%autoreload 2": "tests/faults/test_notebook.py",
}
"""What is no Python that could run here, and why; or the file of tests that runs it elsewhere."""


def pieces(page: Path) -> list[str]:
    """Return the code within lines of a page, without the names of files."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = [re.sub(r"\s+", " ", code.strip()) for _, code in re.findall(r"(`+)(.+?)\1", text, flags=re.DOTALL)]
    files = {code for code in found if "/" in code and (ROOT / code).exists()}
    return [code for code in dict.fromkeys(found) if code not in NO_PROGRAMS and code not in files]


def test_each_piece_has_a_program_and_each_program_its_piece() -> None:
    found = {code for page in PAGES_WITH_PIECES for code in pieces(page)}
    assert found == PROGRAMS.keys(), "write a program for what is missing; delete one whose piece is gone"
    for code, program in PROGRAMS.items():
        assert re.search(re.escape(code).replace(re.escape("..."), r"[^\n]+?"), program), f"where is {code}?"


def test_what_is_no_program_is_elsewhere() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES_WITH_PIECES)
    for code, why in NO_PROGRAMS.items():
        assert f"`{code}`" in texts, f"{code} is no longer on a page"
        if why.startswith("tests/"):
            words = re.findall(r"\w+=\S+\w|%\w+", code)
            assert all(word in (ROOT / why).read_text(encoding="utf-8") for word in words)
        else:
            assert "(" not in code and "synk." not in code, f"{code} could run"


@pytest.fixture
def current(reused: Any) -> Iterator[synk.Runtime]:
    """The current runtime, which other tests have used."""
    runtime = reused(2)
    cell.runtime, cell.session = runtime, runtime._session
    yield runtime
    cell.runtime = cell.session = None


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_piece_runs(code: str, current: synk.Runtime, tmp_path: Path) -> None:
    exec(compile(textwrap.dedent(PROGRAMS[code]), f"<{code}>", "exec"), given(tmp_path))


def given(folder: Path) -> dict[str, Any]:
    """Return what the pieces of code name."""
    namespace: dict[str, Any] = {"__name__": "__main__", "np": np, "pytest": pytest, "synk": synk, "torch": torch}
    exec("def double(x):\n    return x * 2\n\ndef g(item):\n    return item * 2", namespace)
    model = torch.nn.Linear(3, 1)
    return namespace | {
        "f": synk.function(namespace["double"], outputs="gather"),
        "x": np.arange(12.0),
        "items": ["a", (1, 2), 3],
        "table": pd.DataFrame({"price": [0.5, 1.5, 2.0], "amount": [1, 2, 3]}),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "rows": torch.arange(12.0).reshape(4, 3),
        "targets": torch.ones(4, 1),
        "path": folder / "state",
    }
