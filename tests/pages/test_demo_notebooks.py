"""Each notebook runs from top to bottom in a real kernel, is interrupted where it says so, and holds no outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.harness import script

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "demos").glob("*.ipynb"))

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


def test_the_notebooks_are_found() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["tour", "training"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_in_a_kernel(path: Path) -> None:
    result = script(f"NOTEBOOK = {str(path)!r}\n" + DRIVER, timeout=120.0, flags=(), grace_s=10.0)
    result.check("done\n", stderr=None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_holds_no_outputs(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
