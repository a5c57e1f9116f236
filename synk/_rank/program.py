"""How a copy of a frozen program becomes a worker."""

from __future__ import annotations

import json
import socket
import sys

from synk._wire.cell import cell, is_frozen, is_worker


def freeze_support() -> None:
    """Let a frozen program (PyInstaller, cx_Freeze, ...) use workers. Call it first thing in the main program.

    A frozen program has no interpreter to start. So each worker is a copy of the program, which becomes a worker in
    this call and never returns from it. In the program itself, and in one that is not frozen, it returns at once.

    Examples
    --------
    >>> import synk
    >>> synk.freeze_support()
    """
    if not is_frozen():
        return
    if not is_worker():
        cell.has_freeze_support = True
        return
    with open(int(sys.argv[2]), "rb") as file:
        setup = json.load(file)
    sys.path[:] = setup["import_path"]
    from synk._rank.loop import main

    main(socket.socket(fileno=setup["fds"]["socket"]), setup)
    sys.exit()
