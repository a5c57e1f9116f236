"""What a function of the source does with shared memory, in order: the words it loads and stores, fences, calls.

Reads the syntax tree, so a function that is changed shows another outline, whatever the change does.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

# Attributes and local variables that stand for a column of words, or for data.
_WORDS = {
    "_abort_word": "abort",
    "_sequences": "sequences",
    "_ticks": "ticks",
    "_left": "left",
    "_sleeps": "sleeps",
    "sleeps": "sleeps",
    "_places": "places",
    "_verdicts": "verdicts",
    "pids": "pids",
    "_readers": "readers",
    "ticks": "ticks",
    "_requests": "requests",
    "_wanted": "requests",
    "_weights": "requests",
    "_halves": "halves",
    "own": "halves",
    "parts": "halves",
    "heads": "halves",
    "own_heads": "halves",
    "ring": "rings",
    "fronts": "fronts",
    "_word": "fronts",
}
# rendezvous.written[a][b] is a word and rendezvous.written[a] a row of them; a local variable holds such a row.
_ROWS = ("written", "read", "unsent")
# Calls that return a view of data.
_VIEWS = {"part": "halves", "view": "abort", "ndarray": "rings"}
_SYSTEM_CALLS = {
    "os.eventfd_write": "write eventfds",
    "os.eventfd_read": "read eventfds",
    "os.write": "write pipe",
    "os.read": "read pipe",
    "self._poll.poll": "poll",
    "poll.poll": "poll",
}


@functools.cache
def tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))


def outline(module: ModuleType, name: str, calls: Collection[str]) -> list[str]:
    """Return what ``name`` (as ``Class.method.inner``) of a module does; of its calls, those in ``calls``."""
    node: ast.AST = tree(module)
    for part in name.split("."):
        node = next(
            child
            for child in ast.walk(node)
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name == part
        )
    assert isinstance(node, ast.FunctionDef)
    visitor = _Visitor(calls, _constants(module))
    for statement in node.body:
        visitor.visit(statement)
    return visitor.found


@functools.cache
def _constants(module: ModuleType) -> dict[str, str]:
    """The names of a module that stand for the number of a word: ``_CALL = int(Down.CALL)``, alone or in a tuple."""
    found = {}
    for statement in tree(module).body:
        if isinstance(statement, ast.Assign):
            (target,), value = statement.targets, statement.value
            are_several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts) if are_several else [(target, value)]
            found.update({_name(name): word for name, value in pairs if (word := _number(value, {}))})
    return found


class _Visitor(ast.NodeVisitor):
    """Visits a function in the order in which it is evaluated."""

    def __init__(self, calls: Collection[str], constants: dict[str, str]) -> None:
        self._calls = calls
        self._constants = constants
        self.found: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Inner functions are outlined on their own."""

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        for part in (node.value, node.target):
            self.visit(part)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        for part in (*node.generators, node.elt):
            self.visit(part)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = _visit_comprehension

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name == "write" and any(_is_ring(each) for each in node.args):  # a message writes itself into a part of it
            self.found.append("store rings")
            return
        self.generic_visit(node)
        if name in ("fence", "_fence"):
            self.found.append("fence")
        elif (called := ast.unparse(node.func)) in _SYSTEM_CALLS:
            self.found.append(_SYSTEM_CALLS[called])
        elif name in ("pack_into", "unpack_from", "ndarray") and any(_name(each) == "ring" for each in node.args):
            self.found.append("store rings" if name == "pack_into" else "load rings")
        elif name == "tolist" and isinstance(node.func, ast.Attribute) and _name(node.func.value) in _WORDS:
            self.found.append(f"load {_WORDS[_name(node.func.value)]}")
        elif name == "read_memory":
            self.found.append("load arrays")
        elif name == "part":
            self.found.append("load halves")
        elif name in self._calls:
            self.found.append(f"call {name}")

    def visit_Yield(self, node: ast.Yield) -> None:
        """Whoever goes on with a collective has waited until it can."""
        if "yield" in self._calls:
            self.found.append("call yield")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        verb = "load" if isinstance(node.ctx, ast.Load) else "store"
        base, depth = node.value, 1
        self.visit(node.slice)
        while isinstance(base, ast.Subscript):
            self.visit(base.slice)
            base, depth = base.value, depth + 1
        name = _name(base.func) if isinstance(base, ast.Call) else _name(base)
        if isinstance(base, ast.Call):
            for argument in base.args:
                self.visit(argument)
            if name in _VIEWS:
                self.found.append(f"{verb} {_VIEWS[name]}")
        elif number := _number(node.slice, self._constants):
            self.found.append(f"{verb} {number}")
        elif name in _WORDS:
            self.found.append(f"{verb} {_WORDS[name]}")
        elif name in _ROWS and depth > isinstance(base, ast.Attribute):
            self.found.append(f"{verb} {name}")


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_ring(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and _name(node.value) == "ring"


def _number(node: ast.AST, constants: dict[str, str]) -> str:
    """Return X of an expression that holds ``Down.X`` or ``Up.X``, or a constant that stands for it."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and _name(part.value) in ("Down", "Up"):
            return part.attr
        if isinstance(part, ast.Name) and part.id in constants:
            return constants[part.id]
    return ""
