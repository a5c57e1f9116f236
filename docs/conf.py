"""Sphinx configuration: MyST pages, API from the docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pictures

import synk

project = "synk"
author = "The synk authors"
copyright = "2026, The synk authors"
release = version = synk.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
pygments_dark_style = "github-dark"  # the theme's own underlines imports like links
html_title = f"synk {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# What is copied is the program, not its prompts and its output.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# A block without a language is a table or a drawing, not Python.
highlight_language = "text"

add_module_names = False  # headings have the public names
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"npt.DTypeLike": "DTypeLike"}
# Imported only where a GPU is used, and not needed to read their docstrings.
autodoc_mock_imports = [
    "cupy",
    "cupyx",
    "pynccl",
    "numba",
    "mpi4py",
    "torch",
    "joblib",
    "jax",
    "pytensor",
    "tqdm",
]
napoleon_google_docstring = False
# Names that share a description stay together: ``dtype, shape, ndim``.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]


def _escape_axes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep the star of a shape such as ``(rows, *rest)`` from being read as markup."""
    lines[:] = [re.sub(r"(?<!\S)\(((?:\w+, )*)\*(\w+)\)", r"(\1\\*\2)", line) for line in lines]


def _shorten(app: Any, what: str, name: str, obj: Any, options: Any, arguments: str | None, returns: str | None) -> Any:
    """Leave out the arguments of a class that users do not call, as its docstring says; write aliases by name."""
    if what == "class" and re.search(r"\b[Mm]ade by\b(?!.*\bdirectly\b)", obj.__doc__ or ""):
        return "", None
    return arguments and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", arguments), returns


def setup(app: Any) -> None:
    folder = Path(__file__).with_name("_pictures")
    pictures.draw_all(folder)
    subprocess.run([sys.executable, str(Path(__file__).with_name("gallery.py")), str(folder)], check=True)
    app.connect("autodoc-process-docstring", _escape_axes, priority=100)
    app.connect("autodoc-process-signature", _shorten)
