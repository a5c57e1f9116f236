"""What a signal handler of the program raises may be of any type, and is no answer to anything that synk tries.

So whoever catches an error of a general type asks first where it comes from. Read from the source: an exception at the
one step that matters is not met by any number of random ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_layout import sources

GENERAL = {
    "BaseException", "Exception", "OSError", "IOError", "TimeoutError", "RuntimeError", "ValueError", "TypeError",
    "KeyError", "IndexError", "LookupError", "AttributeError", "ArithmeticError",
}  # fmt: skip

MASTER = ("synk._pure", "synk._wire", "synk._master", "synk._api")

ELSEWHERE: dict[str, set[str]] = {
    "synk._pure.interrupts": {"_num_cancels", "plain_interrupts", "is_from_handler"},  # what asks
    "synk._wire.descriptors": {"__del__"},  # Python itself drops what is raised in a finalizer
}


def caught(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of the types that a handler catches."""
    if handler.type is None:
        return {"BaseException"}
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}


def asks(handler: ast.ExceptHandler) -> bool:
    """Whether a handler lets pass what is not for it: by asking, or by raising the same again whatever it is."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and (last.exc is None or ast.unparse(last.exc) == handler.name):
        return True
    return any(
        isinstance(node, ast.Name) and node.id in ("is_from_handler", "is_foreign") for node in ast.walk(handler)
    )


def is_held_back(node: ast.With) -> bool:
    """Whether handlers wait until the block is done."""
    return any("deferred(" in ast.unparse(item.context_expr) for item in node.items)


def careless(tree: ast.AST, name: str = "") -> Iterator[str]:
    """Yield where something may take a signal handler's exception for its own."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else name
        if isinstance(node, ast.With) and is_held_back(node):
            continue
        if isinstance(node, ast.ExceptHandler) and caught(node) & GENERAL and not asks(node):
            yield f"{inner}:{node.lineno}"
        is_suppressing = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
        if is_suppressing and GENERAL & {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}:
            yield f"{inner}:{node.lineno}"
        yield from careless(node, inner)


MODULES = [name for name in sources() if name.startswith(MASTER)]


@pytest.mark.parametrize("module", MODULES)
def test_whoever_catches_a_general_error_asks_where_it_comes_from(module: str) -> None:
    found = list(careless(ast.parse(sources()[module])))
    assert [place for place in found if place.partition(":")[0] not in ELSEWHERE.get(module, ())] == []


@pytest.mark.parametrize(
    "body",
    [
        "try:\n    pass\nexcept OSError:\n    pass",
        "try:\n    pass\nexcept (KeyError, ValueError) as error:\n    raise LookupError from error",
        "try:\n    pass\nexcept:\n    pass",
        "with contextlib.suppress(RuntimeError):\n    pass",
    ],
)
def test_the_rule_can_be_broken(body: str) -> None:
    assert list(careless(ast.parse(body)))
