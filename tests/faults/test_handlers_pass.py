"""What a signal handler of the program raises may be of any type, and is no answer to anything that synk tries.

It comes where synk waits or calls the user's code, and passes whatever catches an ``Exception``; so nobody asks where
an error came from. Who catches everything lets it pass. Read from the source: an exception at the one step that matters
is not met by any number of random ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from test_layout import sources

MASTER = ("synk._pure", "synk._wire", "synk._master", "synk._api")

ELSEWHERE = {
    "synk._master.calls.call": {"complete"},  # ends with the result, by the StopIteration of its steps
    "synk._master.flight.queue": {"_step_oldest", "_poll", "submit"},  # by is_foreign, or as above
    "synk._master.flight.chunks": {"_take", "settle"},
}
"""Functions that end an error of their own, and let others pass."""


def caught(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of the types that a handler catches."""
    if handler.type is None:
        return {"BaseException"}
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}


def careless(tree: ast.AST, name: str = "") -> Iterator[str]:
    """Yield where something may take a signal handler's exception for its own."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else name
        if isinstance(node, ast.Try):
            let_pass = False
            for handler in node.handlers:
                is_raised = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
                let_pass = let_pass or ("HandlerRaised" in caught(handler) and is_raised)
                if "BaseException" in caught(handler) and not (let_pass or is_raised):
                    yield f"{inner}:{handler.lineno}"
        is_suppressing = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
        if is_suppressing and "BaseException" in ast.unparse(node):
            yield f"{inner}:{node.lineno}"
        yield from careless(node, inner)


def test_whoever_catches_everything_lets_pass_what_a_handler_raised() -> None:
    found = [
        f"{name}: {place}"
        for name, text in sources().items()
        if name.startswith(MASTER) and name != "synk._pure.interrupts"
        for place in careless(ast.parse(text))
        if place.partition(":")[0] not in ELSEWHERE.get(name, ())
    ]
    assert found == []


@pytest.mark.parametrize(
    "body",
    [
        "try:\n    pass\nexcept BaseException:\n    pass",
        "try:\n    pass\nexcept (KeyError, BaseException) as error:\n    raise LookupError from error",
        "try:\n    pass\nexcept:\n    pass",
        "with contextlib.suppress(BaseException):\n    pass",
    ],
)
def test_the_rule_can_be_broken(body: str) -> None:
    assert list(careless(ast.parse(body)))


@pytest.mark.parametrize(
    ("name", "num_files"),
    [
        ("raised_by_handler", 3),  # who notes the cause of a call that it has ended, and whether it was Ctrl-C
        ("is_from_handler", 3),  # the comparisons before a call that fits, which holds no handler back; tracebacks
    ],
)
def test_few_files_ask_what_a_handler_raised(name: str, num_files: int) -> None:
    found = {module for module, text in sources().items() if re.search(name, text)} - {"synk._pure.interrupts"}
    assert len(found) <= num_files, found
