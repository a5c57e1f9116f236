"""What README and the pages keep to: their length, their words, the picture of the README."""

from __future__ import annotations

import importlib.util
import inspect
import re

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
