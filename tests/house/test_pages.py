"""What README and the pages keep to: their length, their words, the picture of the README.

What a type checker says of programs that use synk: mypy with ``--strict``, as their authors run it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from support.harness import PACKAGE_FOLDER

import synk

README = PACKAGE_FOLDER / "README.md"
PAGES = sorted((PACKAGE_FOLDER / "docs").glob("*.md"))
MOST_WORDS = {"README": 560, "all pages": 40_000}
MOST_PAGES = 26 + 7
"""The pages of the table in docs/index.md, and those of the API that docs/api.md lists."""

BANNED = {
    "of its own": "its, separate, private",
    r"\bwhat it\b": "name the thing",
    r"\blies\b": "is",
    r"\b(brings|brought)\b": "sends, copies, installs",
    "says so": "reports it",
    "belongs into": "belongs in",
    r"\ba training\b(?! (step|loop|set))": "a run, a training loop",
    "goes on with": "continues with",
    r"\btold\b": "informed, sent",
    "in silence": "silently",
    r"\b(master|head)\b": "program",
}
"""What a native writer would not write, or a second word for a thing that has one; and what to write."""


def prose(text: str) -> str:
    """Return a page without its blocks of code, its pieces of code and the targets of its links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))


def count(text: str) -> int:
    return len(re.findall(r"[A-Za-z][\w'-]*", text))


def test_lengths() -> None:
    assert count(prose(README.read_text())) <= MOST_WORDS["README"]
    assert sum(len(page.read_text().split()) for page in PAGES) <= MOST_WORDS["all pages"]
    assert len(PAGES) <= MOST_PAGES


def public_docstrings() -> dict[str, str]:
    """Return the docstrings of the public names and of their public members."""
    found = {}
    for name in (each for each in dir(synk) if not each.startswith("_")):
        owner = getattr(synk, name)
        found[name] = inspect.getdoc(owner) or ""
        for member in dir(owner):
            if not member.startswith("_") and (inspect.isclass(owner) or inspect.ismodule(owner)):
                found[f"{name}.{member}"] = inspect.getdoc(getattr(owner, member)) or ""
    return found


def test_banned_words() -> None:
    texts = {page.stem: page.read_text() for page in (README, *PAGES)} | public_docstrings()
    found = [(name, words) for name, text in texts.items() for words in BANNED if re.search(words, prose(text))]
    assert not found, [(name, words, BANNED[words]) for name, words in found]


def test_the_readme_has_the_words_of_the_field() -> None:
    text = README.read_text()
    words = ("fork", "function", "distribute", "`Data`", "axis 0", "NCCL", "all-reduce", "numpy", "CuPy", "pynccl")
    words += ("cloudpickle", "replicate", "DataParallel", '"avg"', '"sum"', '"gather"', "H100")
    assert [word for word in words if word.lower() not in text.lower()] == []


def test_the_picture_of_the_readme_is_drawn_from_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("pictures", PACKAGE_FOLDER / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert (PACKAGE_FOLDER / "docs" / "_static" / "speed_up.svg").read_text() == pictures.for_the_readme()


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
