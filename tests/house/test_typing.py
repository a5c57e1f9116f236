"""What a type checker says of programs that use synk: mypy with ``--strict``, as their authors run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERBS = """\
import numpy as np
import numpy.typing as npt

import synk

Array = npt.NDArray[np.float64]

synk.fork()


@synk.function(bcast_inputs="w")
def loss_and_grad(w: Array, x: Array, y: Array) -> tuple[float, Array]:
    r = x @ w - y
    return float(0.5 * (r @ r) / len(x)), r @ x / len(x)


x, y, w = synk.data(np.ones((4, 3))), synk.data(np.ones(4)), np.zeros(3)
assert loss_and_grad.verify(w, x, y)
loss, grad = loss_and_grad(w, x, y)
w -= 0.9 * grad

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

# What libraries of the user's say of themselves is not asked: it would take a minute. Nor is what is in the bodies of
# synk's functions, as where it is installed.
CONFIGURATION = """\
[mypy]
strict = True
error_summary = False
[mypy-synk.*]
ignore_errors = True
[mypy-torch.*]
follow_imports = skip
"""


def test_programs_pass_strict_and_a_slip_is_found(tmp_path: Path) -> None:
    """The slips show that each function keeps its signature."""
    (tmp_path / "program.py").write_text(VERBS + "".join(f"    {slip}\n" for slip in SLIPS), encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(CONFIGURATION, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "program.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said: dict[int, str] = {}
    for line in result.stdout.splitlines():
        number = int(line.split(":")[1])
        said[number] = said.get(number, "") + line
    first = VERBS.count("\n") + 1
    assert result.returncode == 1 and said.keys() == {*range(first, first + len(SLIPS))}, result.stdout + result.stderr
    for (slip, message), text in zip(SLIPS.items(), map(said.get, sorted(said))):
        assert message in str(text), slip
