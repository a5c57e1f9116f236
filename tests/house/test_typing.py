"""What a type checker says of programs that use synk: mypy with ``--strict``, as their authors run it."""

from __future__ import annotations

import subprocess
import sys

import pytest

README = """\
import numpy as np
import numpy.typing as npt

import synk

Array = npt.NDArray[np.float64]

synk.fork()


@synk.function(bcast_inputs="w")
def loss_and_grad(w: Array, x: Array, y: Array) -> tuple[float, Array]:
    r = x @ w - y
    return float(0.5 * (r @ r) / len(x)), r @ x / len(x)


X = np.random.default_rng(0).standard_normal((1000, 10))
x, y, w = synk.data(X), synk.data(X @ np.linspace(-1, 1, 10)), np.zeros(10)
assert loss_and_grad.verify(w, x, y)
for step in range(20):
    loss, grad = loss_and_grad(w, x, y)
    w -= 0.9 * grad
"""

VERBS = """\
import numpy as np
import numpy.typing as npt

import synk

Array = npt.NDArray[np.float64]

with synk.fork(2, timeout=60.0) as rt:
    weights = synk.shared(np.zeros(3), name="weights")

    def total(x: Array, scale: float = 1.0) -> float:
        return float(x.sum() * scale)

    f = synk.function(total, outputs="sum", bcast_inputs=("scale",))
    g = rt.function(total, outputs="sum")
    f(np.ones(4))
    f(np.ones(4), scale=2.0)
    f(synk.data(np.ones(4)), weights, batch=slice(2), num_slices=2, timeout=5.0)
    f.serial(np.ones(4))
    pending: synk.PendingCall[float] = f.submit(np.ones(4))
    value: float = pending.result(timeout=10.0) + f(np.ones(4)) + f.serial(synk.data(np.ones(4)))
    values: list[float] = list(f.stream([np.ones(4)]))
    names: list[str] = list(synk.map(str, range(3))) + list(rt.map(lambda a, b: a * b, "ab", [1, 2]))

    async def wait() -> float:
        return await f.submit(np.ones(4))
    g(np.ones(3))
    length: int = rt.world_size
    weights.value = np.ones(3)
    synk.broadcast(weights)
"""


SLIPS = {
    "f.sumbit(1)": 'has no attribute "sumbit"',
    "weights.vlaue = 1": 'has no attribute "vlaue"',
    "reveal_type(f)": 'Revealed type is "synk._api.function.Function[[x:',
    "reveal_type(synk.function(outputs='sum')(total))": 'Revealed type is "synk._api.function.Function[[x:',
    "reveal_type(f(np.ones(4)))": 'Revealed type is "float"',
    "reveal_type(f(np.ones(4), output_subset=[0]))": 'Revealed type is "Any"',
    "reveal_type(synk.function(outputs=('sum',))(total)(np.ones(4)))": 'Revealed type is "float"',
    "reveal_type(synk.function(total, outputs=None)(np.ones(4)))": 'Revealed type is "Any"',
    "reveal_type(synk.function(total, updates=[weights])(np.ones(4)))": 'Revealed type is "Any"',
    "reveal_type(f.submit(np.ones(4)).result())": 'Revealed type is "float"',
    "reveal_type(next(rt.map(len, ['a'])))": 'Revealed type is "int"',
    "synk.map(len, ['a'], ordered=1.5)": 'incompatible type "float"; expected "bool"',
}

# What libraries of the user's say of themselves is not asked: it would take a minute.
CONFIGURATION = "[mypy]\nstrict = True\nerror_summary = False\n[mypy-torch.*]\nfollow_imports = skip\n"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what mypy says of all programs, line by line."""
    folder = tmp_path_factory.mktemp("programs")
    slips = VERBS + "".join(f"    {slip}\n" for slip in SLIPS)
    for name, text in {"readme.py": README, "verbs.py": VERBS, "slips.py": slips, "mypy.ini": CONFIGURATION}.items():
        (folder / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache")]
    files = ["readme.py", "verbs.py", "slips.py"]
    result = subprocess.run([*command, *files], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_programs_pass_strict(said: list[str]) -> None:
    assert [line for line in said if not line.startswith("slips.py")] == []


def test_a_slip_is_found_and_the_own_signature_is_shown(said: list[str]) -> None:
    for number, (slip, message) in enumerate(SLIPS.items(), VERBS.count("\n") + 1):
        lines = [line for line in said if line.startswith(f"slips.py:{number}:")]
        assert any(message in line for line in lines), (slip, said)
