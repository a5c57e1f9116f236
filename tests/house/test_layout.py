"""The folders of the package: which process each file lives in, and what it may import. docs/design.md has the picture.

Every import of every file counts: in functions, under TYPE_CHECKING, and of the package itself.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator

from support.harness import PACKAGE_FOLDER

_BELOW_BOTH = ("cuda", "communicators", "backends", "_wire", "_pure", "errors", "_version")

BELOW: dict[str, tuple[str, ...]] = {
    "_version": (),
    "errors": (),
    "_pure": ("errors",),
    "_wire": ("_pure", "errors", "_version"),
    "backends": ("_wire", "_pure", "errors"),
    "communicators": ("backends", "_wire", "_pure", "errors"),
    "cuda": ("communicators", "backends", "_wire", "_pure", "errors"),
    "_rank": (*_BELOW_BOTH,),
    "_processes": (*_BELOW_BOTH,),
    "_code": ("_processes", *_BELOW_BOTH),
    "_engine": ("_code", "_processes", *_BELOW_BOTH),
    "cluster": ("_engine", "_rank", "_code", "_processes", *_BELOW_BOTH),
    "_api": ("_engine", "_code", "_processes", "cluster", *_BELOW_BOTH),
    "profiler": ("_api", "_engine", "_wire", "_pure", "errors"),
    "torch": ("_api", "_code", "_processes", "_rank", "communicators", "_wire", "_pure", "errors"),
    "": ("torch", "profiler", "_api", "_rank", "communicators", "_wire", "_pure", "errors", "_version"),
    "__main__": ("",),
    "extensions": ("", "_pure", "errors"),
    "check": ("", "torch", "cuda", "_wire", "_pure", "errors", "_version"),
}
"""What each folder, or file beside the folders, may import; ``""`` is the package's own ``__init__``."""

FOLDERS = ("_api", "_engine", "_rank", "_code", "_processes", "_wire", "_pure")

SEES_ALSO = {
    "synk.backends": "cuda",  # by name, when a backend is opened
    "synk._engine.inline": "_rank",  # a rank in the program: the one place where both halves meet
    "synk": "extensions",  # by name, when joblib makes its backend
    "synk.extensions.joblib": "_api",
}
"""Of a package with a half in each process, which half a file belongs to."""


def sources() -> dict[str, str]:
    """Return the text of every file of the package by the name of its module."""
    found = {}
    for path in sorted((PACKAGE_FOLDER / "synk").rglob("*.py")):
        parts = path.relative_to(PACKAGE_FOLDER).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Return the imports and the texts in a file."""
    wanted = (ast.Import, ast.ImportFrom, ast.Constant)
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, wanted))


def imported(name: str, text: str, modules: dict[str, str]) -> Iterator[str]:
    """Yield the modules of the package that a file imports anywhere."""
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "synk")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            if (node.module or "").partition(".")[0] == "synk":
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (module if module in modules else str(node.module) for module in whole)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if "." in node.value and node.value in modules else []  # import_module("synk.x")


def part_of(module: str) -> str:
    """Return the folder of a module, or its name where it lies beside the folders."""
    return module.split(".")[1] if "." in module else ""


def violations(modules: dict[str, str]) -> list[str]:
    """Return all that breaks the rule, as text."""
    found = []
    graph = {name: {each for each in imported(name, text, modules) if each != name} for name, text in modules.items()}
    for name, targets in graph.items():
        own = part_of(name)
        if own not in BELOW:
            found.append(f"{name} lies in no known folder")
            continue
        for target in sorted(targets):
            part = part_of(target)
            if part != own and part not in BELOW[own] and SEES_ALSO.get(name) != part:
                found.append(f"{name} imports {target}")
            if target == f"synk.{own}" and own in FOLDERS:
                found.append(f"{name} imports its folder")
    return found + [f"circle: {' -> '.join(circle)}" for circle in circles(graph)]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return one circle through each module that has one."""
    found = []
    for start in graph:
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop()
            for target in sorted(graph.get(path[-1], ())):
                if target == start:
                    found.append([*path, start])
                    paths = []
                    break
                if target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return found


def test_every_import_follows_the_rule() -> None:
    found = violations(sources())
    assert not found, f"move what both need to a folder below both (BELOW and INNER list them): {found}"


BREAKS = (
    ("synk._pure.shards", "import synk._processes.placement"),
    ("synk._pure.shards", "from synk._wire import memory"),
    ("synk._code.book", "from synk._engine.plan import Plan"),
    ("synk._processes.output", "def f():\n    from synk._engine.plan import Plan"),
    ("synk._rank.call", "from synk._engine.plan import Plan"),
    ("synk._engine.plan", "if TYPE_CHECKING:\n    from synk._rank.rank import Rank"),
    ("synk._engine.plan", "import importlib\nimportlib.import_module('synk._rank.rank')"),
    ("synk._engine.plan", "from synk import _rank"),
    ("synk._api.runtime", "from synk._rank.rank import Rank"),
    ("synk._engine.data", "from synk import Runtime"),
    ("synk.extensions.optax", "from synk._api.function import Function"),
    ("synk._attic.box", "x = 1"),
)


def test_the_rule_can_be_broken() -> None:
    for module, line in BREAKS:
        modules = sources()
        modules[module] = modules.get(module, "") + "\n" + line
        assert violations(modules), (module, line)


def test_each_folder_says_where_it_lives() -> None:
    for folder in FOLDERS:
        text = ast.get_docstring(ast.parse(sources()[f"synk.{folder}"])) or ""
        assert 2 <= len(text.splitlines()) <= 8, f"say in 2 to 8 lines of synk/{folder}/__init__.py what lives there"


def test_a_long_file_says_why() -> None:
    long = {name: text for name, text in sources().items() if len(text.splitlines()) > 400}
    reasons = {name: " ".join((ast.get_docstring(ast.parse(text)) or "").split()) for name, text in long.items()}
    silent = [name for name, why in reasons.items() if "In one file because" not in why]
    assert not silent, f"divide, or say 'In one file because ...' in the module's docstring (over 400 lines): {silent}"


def public_names(module: str) -> set[str]:
    """Return what ``__all__`` of a module lists."""
    assigned = [node for node in ast.parse(sources()[module]).body if isinstance(node, ast.Assign)]
    (value,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__")
    return {name for name in ast.literal_eval(value) if name[0] != "_"}


def test_each_public_name_is_in_all_its_places() -> None:
    """A name that a list lacks is found in the program, but not on a worker, by a star import, or by a reader."""
    public = public_names("synk") | {"map"}
    imports = [node for node in nodes_of(sources()["synk._api.names"]) if isinstance(node, ast.ImportFrom)]
    missing = {each.name for node in imports for each in node.names} - public
    assert not missing, f"add to __all__ in synk/__init__.py: {sorted(missing)}"
    docs = PACKAGE_FOLDER / "docs"
    for folder, names in (("synk", public), ("synk.torch", public_names("synk.torch"))):
        pages = "".join(path.read_text(encoding="utf-8") for path in sorted(docs.glob("api_*.md")))
        missing = {name for name in names if not re.search(rf"^## {folder}\.{name}$", pages, re.MULTILINE)}
        assert not missing, f"give a heading and an eval-rst block on a page docs/api_*.md: {folder}. {sorted(missing)}"
    index = (docs / "api.md").read_text(encoding="utf-8")
    missing = {name for name in public if f"`synk.{name}`" not in index}
    assert not missing, f"add to the table of docs/api.md: {sorted(missing)}"


def glossary() -> list[tuple[str, str, str]]:
    """Return the words of docs/design.md, each with its file and the name in it."""
    text = (PACKAGE_FOLDER / "docs" / "design.md").read_text(encoding="utf-8").split("## Words\n")[1].split("\n## ")[0]
    return re.findall(r"^\| ([^|*]+) \| [^|]+ \| `(\S+)` `(\w+)` \|$", text, re.MULTILINE)


def test_the_glossary_names_what_exists() -> None:
    found = glossary()
    assert len(found) >= 40
    for word, file, name in found:
        text = (PACKAGE_FOLDER / "synk" / file).read_text(encoding="utf-8")
        defined = {node.name for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert name in defined, f"{word}: {file} defines no {name}"
    words = [word.strip() for entry, _, _ in found for word in entry.split(",")]
    assert len(words) == len(set(words)), "each word once"


OF_NO_FOLDER = {"support", "house", "pages", "seeds", "faults", "first_hour", "training"}
"""Folders that mirror none of the package: ``house`` is of the repository, ``pages`` of README, docs, demos, ``seeds``
of the files beside the demos in ``demos/seeds``. The last is of ``synk.torch``: a folder of that name could hide torch.
"""


def test_the_tests_mirror_the_package() -> None:
    package = PACKAGE_FOLDER / "synk"
    folders = {str(path.parent.relative_to(package)).replace("_", "", 1) for path in package.rglob("*.py")}
    for path in (PACKAGE_FOLDER / "tests").rglob("test_*.py"):
        folder = str(path.parent.relative_to(PACKAGE_FOLDER / "tests"))
        assert folder in folders | OF_NO_FOLDER, f"{path} mirrors no folder of synk. There are {sorted(folders)}"


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their name alone."""
    counts = Counter(path.name for path in (PACKAGE_FOLDER / "tests").rglob("test_*.py"))
    twice = [name for name, count in counts.items() if count > 1]
    assert not twice, f"rename one of each: {twice}"
