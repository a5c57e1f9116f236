"""Takes out of a text what a bug report does not need: folders, the name of the machine and of the user, UUIDs."""

from __future__ import annotations

import getpass
import platform
import re
from typing import Any

_FOLDERS = re.compile(r"(?<![\w/.])/(?:[\w.@+~-]+/)+")
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}[0-9a-fA-F-]*")


def without_places(value: Any) -> Any:
    """Return text, or lists and dicts of text, with file names in the place of whole paths."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    text = _UUID.sub(r"\1-...", _FOLDERS.sub(".../", value))
    for name, word in ((platform.node(), "<machine>"), (_user(), "<user>")):
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a number without a name
        return ""
