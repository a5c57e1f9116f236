"""The texts of errors have one form: ``cannot <verb> <object>: got <value>, expected <rule>. <next step>.``

All raise statements of the package are parsed. Errors of the runtime (``SynkError``) may begin with what has happened
instead, because nothing is wrong with what the user asked for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synk import errors

PACKAGE = Path(errors.__file__).parent

OTHERS = {
    # text, with {} for what is filled in: why it has another form
    "len() of {} with no axes": "NumPy's own words for it",
    "{}() got an unexpected keyword argument {}, expected one of {}{}.{}": "as Python says it of such a call",
    "{}() {}": "as Python says it of a call that does not fit",
    "the other side closed its end": "inside: a death is told by the process's own descriptor",
    "more than {} bytes": "inside: an exception that is too large to travel",
    "failpoint {}": "what tests have a worker raise",
    "got {}, expected objects that each worker gets a copy of. Map a function that refers to it": (
        "a part of the text that names the item"
    ),
    "the dataclass {} cannot be built from its fields ({})": "a part of the text that names the argument",
    "its {} cannot be pickled ({})": "likewise",
    "rank {} gave up waiting: the call was aborted after a failure elsewhere.": "of a rank whose error is not shown",
}

FORM = re.compile(r"cannot [^:]+: .*[.?}]$|cannot [^:]+\. .*[.?}]$", re.DOTALL)
SENTENCE = re.compile(r"[^A-Z].*[.?}]$", re.DOTALL)
INTERNAL = {
    "AssertionError", "NotImplementedError", "OSError", "StopIteration", "SystemExit", "KeyboardInterrupt",
    "Failed", "NotComparable",  # a part of a note in the report of verify
    "Broken",  # a sentence in the report of synk.check
}  # fmt: skip


class Texts:
    """The texts of the errors that a file raises. Those that a function of the file makes are looked up there."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        defined = [node for node in ast.walk(self._tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        self._functions = {node.name: node for node in defined if isinstance(node, ast.FunctionDef)}
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._assigned.setdefault(node.targets[0].id, []).append(node.value)
        self._constants = {
            target.id: node.value
            for node in self._tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def __iter__(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, class and text of each."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for kind, text in self._made_by(node.exc):
                    yield node.lineno, kind, text

    def _made_by(self, call: ast.Call) -> Iterator[tuple[str, str]]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in self._functions:  # it returns an exception
            for node in ast.walk(self._functions[name]):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                    yield from self._made_by(node.value)
        elif re.match("[A-Z]", name) and call.args:
            for text in self._texts(call.args[0]):
                yield name, text

    def _texts(self, node: ast.AST | None) -> list[str]:
        """Return the texts that an expression may stand for; none where another file makes it."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            texts = [""]
            for part in node.values:
                own = [str(part.value)] if isinstance(part, ast.Constant) else self._filled(part)
                texts = [text + more for text in texts for more in own]
            return texts
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [a + b for a in self._texts(node.left) or ["{}"] for b in self._texts(node.right) or ["{}"]]
        if isinstance(node, ast.IfExp):
            return self._texts(node.body) + self._texts(node.orelse)
        if isinstance(node, ast.Name) and node.id in self._constants:
            return self._texts(self._constants[node.id])
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in self._functions:
                made = [each.value for each in ast.walk(self._functions[name]) if isinstance(each, ast.Return)]
                return [text for value in made for text in self._texts(value)]
        return []

    def _filled(self, part: ast.AST) -> list[str]:
        """Return what stands for a value: the beginnings of texts have names of their own."""
        value = part.value if isinstance(part, ast.FormattedValue) else part
        if isinstance(value, ast.Name):
            for assigned in self._assigned.get(value.id, ()):
                found = [text for text in self._texts(assigned) if text.startswith("cannot ")]
                if found:
                    return found[:1]
        return ["{}"]


@functools.cache
def all_texts() -> list[tuple[str, int, str, str]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, kind, text in Texts(path.read_text(encoding="utf-8")):
            found.append((str(path.relative_to(PACKAGE)), line, kind, text))
    return found


def has_form(kind: str, text: str) -> bool:
    known: Any = getattr(errors, kind, None)
    is_of_the_runtime = inspect.isclass(known) and issubclass(known, errors.SynkError)
    return bool(FORM.match(text) or (is_of_the_runtime and SENTENCE.match(text)))


def test_the_texts_of_errors_have_one_form() -> None:
    texts = [each for each in all_texts() if each[2] not in INTERNAL]
    assert len(texts) > 250
    others = [each for each in texts if not has_form(each[2], each[3])]
    unknown = [each for each in others if each[3] not in OTHERS]
    assert not unknown, (
        "write them as 'cannot <verb> <object>: got <value>, expected <rule>. <next step>.'\n"
        + "\n".join(f"synk/{file}:{line}: {kind}: {text}" for file, line, kind, text in unknown)
    )
    assert len(others) <= 0.05 * len(texts)
    assert {each[3] for each in others} == set(OTHERS), "what is no longer said should not be excused"


def test_no_word_is_broken_by_the_source() -> None:
    """A line of the source that breaks off in mid-sentence has left its mark in a text."""
    for file, line, _, text in all_texts():
        where = f"synk/{file}:{line}: join its parts by one blank, with none before a stop: {text}"
        assert "\n" not in text.strip() or ":\n" in text or "\n{}" in text, where
        assert "  " not in text and not re.search(r" [.,;:]( |$)", text), where


def test_texts_have_one_word_for_a_thing() -> None:
    words = (r"\bmaster\b", "of (its|your) own", "has a meaning", "belongs into")  # program, separate, can be used, in
    assert not [each for each in all_texts() if any(re.search(word, each[3]) for word in words)]
