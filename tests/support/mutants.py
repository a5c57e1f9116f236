"""Faults of one line, put into the source one at a time: which ones do the tests find? ``make mutants``.

They are drawn at random, the same for one seed, over the lines of ``synk/`` that a test executes: no imports, texts,
annotations or log messages. Each runs in a copy of the repository, first the tests of its folder, then all others,
until one fails. A fault that none finds is a hole in the tests, or changes nothing that can be seen.

    make mutants ARGS="--count 30 --seed 44"
    make mutants ARGS="--only 3 17"            some of them again
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 2400
"""A fault after which the tests are not done by then hangs them: it counts as found."""

NEAREST = {
    "_api": "api first_hour engine",
    "_engine": "engine faults api",
    "_rank": "rank engine api faults",
    "_code": "code",
    "_processes": "processes faults",
    "_wire": "wire engine",
    "_pure": "pure engine",
    "backends": "backends cuda",
    "communicators": "communicators",
    "cluster": "cluster",
    "cuda": "cuda backends",
    "torch": "training",
    "extensions": "extensions",
    "check": "check",
}
"""The folders of tests that run first, for each folder of the package."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SILENT = (*FUNCTIONS, ast.ClassDef, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
SAYS = re.compile(r"\b(log|logger|logging|warnings?|warn)\b")


@dataclass(frozen=True)
class Mutant:
    """A fault: in a file, what stands between two columns of a line, and what stands there instead."""

    file: str
    line: int
    start: int
    stop: int
    text: str
    probe_line: int
    """The line of the statement that it is part of, before which another statement can stand."""

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.text + line[self.stop :]
        return "".join(lines)

    def __str__(self) -> str:
        line = (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1]
        return f"{self.file}:{self.line}: {line[self.start : self.stop]}  ->  {self.text}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all faults of a file, for statements in functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, FUNCTIONS) and function.name not in ("__repr__", "__str__"):
            for statement in function.body:
                yield from faults_in(statement, str(path.relative_to(ROOT)), statement.lineno)


def faults_in(node: ast.AST, file: str, probe_line: int, parent: ast.AST | None = None) -> Iterator[Mutant]:
    """Yield the faults of a node and of what it consists of. Functions in it have a turn of their own."""
    if isinstance(node, SILENT) or (isinstance(node, ast.Expr) and SAYS.search(ast.unparse(node))):
        return
    if isinstance(node, ast.stmt):
        is_elif = isinstance(node, ast.If) and isinstance(parent, ast.If) and node.col_offset == parent.col_offset
        probe_line = probe_line if is_elif else node.lineno
    for new in replacements(node):
        if node.lineno == node.end_lineno and new != ast.unparse(node):  # type: ignore[attr-defined]
            yield Mutant(file, node.lineno, node.col_offset, node.end_col_offset, new, probe_line)  # type: ignore[attr-defined]
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from faults_in(child, file, probe_line, node)


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield what may stand in the place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = copy.deepcopy(node)
        other.ops = [COMPARISONS[type(node.ops[0])]()]
        yield f"({ast.unparse(other)})"
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other_op, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not any(isinstance(each, ast.JoinedStr) or is_text(each) for each in (node.left, node.right)):
            yield f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        yield "return None"
    elif isinstance(node, ast.AugAssign) or is_call(node) or is_store(node):
        yield "pass"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def draw(count: int, seed: int) -> list[Mutant]:
    """Return faults of random lines, one a line."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted((ROOT / "synk").rglob("*.py")):
        for mutant in mutants_of(path):
            lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    rng = random.Random(seed)
    return [rng.choice(lines[line]) for line in rng.sample(sorted(lines), count)]


def copy_of_repository(folder: Path) -> Path:
    """Copy all files that git knows."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def pytest_in(folder: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest in a copy. Return its status, None after too long, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments]
    command += ["-n", "logical", "--maxprocesses", "8", "--dist", "worksteal"]
    with open(folder / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return status, log.read()


def executed(mutants: Sequence[Mutant]) -> list[bool]:
    """Run all tests once, with a mark before each fault's statement; return which of them were reached."""
    with tempfile.TemporaryDirectory() as name:
        folder = copy_of_repository(Path(name))
        marks = folder / "marks"
        marks.mkdir()
        for file in {mutant.file for mutant in mutants}:
            lines = (folder / file).read_text(encoding="utf-8").splitlines(keepends=True)
            here = [(mutant.probe_line, number) for number, mutant in enumerate(mutants) if mutant.file == file]
            for line, number in sorted(here, reverse=True):
                indent = re.match(r"\s*", lines[line - 1]).group()  # type: ignore[union-attr]
                lines.insert(line - 1, f"{indent}open({str(marks / str(number))!r}, 'a').close()\n")
            (folder / file).write_text("".join(lines), encoding="utf-8")
        pytest_in(folder, [], LONGEST_S)
        return [(marks / str(number)).exists() for number in range(len(mutants))]


def find(mutant: Mutant) -> str:
    """Return the first test that finds a fault; an empty text if none does."""
    with tempfile.TemporaryDirectory() as name:
        folder = copy_of_repository(Path(name))
        file = folder / mutant.file
        file.write_text(mutant.applied(file.read_text(encoding="utf-8")), encoding="utf-8")
        part = Path(mutant.file).parts[1]
        near = [f"tests/{each}" for each in NEAREST.get(part, "first_hour api").split()]
        for arguments in (near, [f"--ignore={each}" for each in near]):
            status, said = pytest_in(folder, ["-x", *arguments], LONGEST_S)
            if status is None:
                return f"not done after {LONGEST_S} s"
            if status != 0:
                named = re.findall(r"^(?:FAILED|ERROR|SUBFAILED\S*) (.*)$", said, re.MULTILINE)
                return named[0] if named else said.strip()[-200:]
    return ""


def main() -> int:
    """Draw, keep what a test executes, try each; return 1 if one was not found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--list", action="store_true", help="draw only; lines that no test executes are among them")
    parser.add_argument("--executed", type=int, nargs="*", help="the numbers of those that a test executes, if known")
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some, to try no others")
    options = parser.parse_args()
    drawn = draw(options.count + options.count // 3, options.seed)
    if options.list:
        print("\n".join(f"{number:3} {mutant}" for number, mutant in enumerate(drawn)))
        return 0
    known = options.only or options.executed
    reached = list(known) if known else [number for number, each in enumerate(executed(drawn)) if each]
    print(f"a test executes {len(reached)} of {len(drawn)}: {' '.join(map(str, reached))}", flush=True)
    survivors = 0
    for number in reached[: options.count]:
        found = find(drawn[number])
        survivors += not found
        print(f"{number:3} {'found   ' if found else 'SURVIVED'} {drawn[number]}  [{found}]", flush=True)
    print(f"{survivors} of {min(len(reached), options.count)} were not found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
