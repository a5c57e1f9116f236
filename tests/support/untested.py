"""The files of the package that no test names, and their lines: ``python tests/support/untested.py``.

They are tested through others only. A test names a file as ``quick.py`` looks for it.
"""

from __future__ import annotations

from quick import ROOT, names_of

if __name__ == "__main__":
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for path in sorted((ROOT / "synk").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if path.name != "__init__.py" and not any(name in tests for name in names_of(file)):
            print(f"{len(path.read_text().splitlines()):5} {file}")
