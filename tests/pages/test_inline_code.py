"""The code within the lines and tables of the README and of the how-to page runs; their blocks are of test_docs.py.

Each piece stands, as it is written, in a program below, where ``...`` is whatever the program has there. So a piece
that is new on a page fails here until there is a program for it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import synk
from synk._wire.cell import cell

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "howto.md")

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
    found = {code for page in PAGES for code in pieces(page)}
    assert found == PROGRAMS.keys(), "write a program for what is missing; delete one whose piece is gone"
    for code, program in PROGRAMS.items():
        assert re.search(re.escape(code).replace(re.escape("..."), r"[^\n]+?"), program), f"where is {code}?"


def test_what_is_no_program_is_elsewhere() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for code, why in NO_PROGRAMS.items():
        assert f"`{code}`" in texts, f"{code} is no longer on a page"
        if why.startswith("tests/"):
            words = re.findall(r"\w+=\S+\w|%\w+", code)
            assert all(word in (ROOT / why).read_text(encoding="utf-8") for word in words)
        else:
            assert "(" not in code and "synk." not in code, f"{code} could run"


def test_a_new_piece_is_found(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("| `old()` | ``a `b` `` |\n```python\nno_piece()\n```\nand `new(\n  x)`, in `docs/errors.md`\n")
    assert pieces(page) == ["old()", "a `b`", "new( x)"]


@pytest.fixture
def current(reused: Any) -> Iterator[synk.Runtime]:
    """The current runtime, which other tests have used."""
    runtime = reused(2)
    cell.runtime, cell.session = runtime, runtime._session
    yield runtime
    cell.runtime = cell.session = None


@pytest.mark.with_torch
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
