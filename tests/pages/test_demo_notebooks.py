"""Each notebook runs from top to bottom, is interrupted where it says so, and holds no outputs."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.harness import ctrl_c_when, script

FOLDER = Path(__file__).resolve().parents[2] / "demos"

DRIVER = """
import json, queue
from jupyter_client.manager import KernelManager

manager = KernelManager(transport="ipc")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
for cell in json.load(open(NOTEBOOK, encoding="utf-8"))["cells"]:
    if cell["cell_type"] != "code":
        continue
    is_interrupted = "interrupt" in cell["metadata"].get("tags", ())
    message_id = client.execute("".join(cell["source"]))
    ended, is_waiting = "", is_interrupted
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        content = message["content"]
        if message["msg_type"] == "stream" and is_waiting:
            is_waiting = False
            manager.interrupt_kernel()
        elif message["msg_type"] == "error":
            ended = content["ename"]
            if not is_interrupted:
                sys.stderr.write("\\n".join(content["traceback"]))
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            break
    assert ended == ("KeyboardInterrupt" if is_interrupted else ""), (ended, cell["source"])
client.stop_channels()
manager.shutdown_kernel(now=False)
print("done")
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_tour_runs_in_a_kernel() -> None:
    result = script(f"NOTEBOOK = {str(FOLDER / 'tour.ipynb')!r}\n" + DRIVER, timeout=120.0, flags=(), grace_s=10.0)
    result.check("done\n", stderr=None)


@pytest.mark.with_torch
def test_the_training_runs_in_this_process() -> None:
    """A kernel and its workers would import torch three times."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(FOLDER / "training.ipynb"):
        printed = io.StringIO()
        is_interrupted = "interrupt" in cell["metadata"].get("tags", ())
        end = contextlib.ExitStack()
        if is_interrupted:
            end.enter_context(pytest.raises(KeyboardInterrupt))
            end.enter_context(ctrl_c_when(printed.getvalue))
        with end, contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), namespace)


def test_notebooks_hold_no_outputs() -> None:
    notebooks = sorted(FOLDER.glob("*.ipynb"))
    assert [path.stem for path in notebooks] == ["tour", "training"]
    for path in notebooks:
        cells = code_cells(path)
        assert len(cells) > 6
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
