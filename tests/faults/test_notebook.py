"""A real notebook kernel: run a cell, interrupt it, redefine a function, restart the kernel, shut it down."""

from __future__ import annotations

from support.edited_module import LIBRARY
from support.harness import script

DRIVER = '''
import sys, tempfile
from support import harness
from jupyter_client.manager import KernelManager

manager = KernelManager(transport="ipc", ip=tempfile.mkdtemp() + "/kernel")  # else all kernels in a folder share a name
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)


def run(code, interrupt_at=None):
    """Run a cell and return its status and what it printed; interrupt it once it printed ``interrupt_at``."""
    message_id = client.execute(code)
    printed = ""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            printed += content["text"]
            if interrupt_at is not None and interrupt_at in printed:
                interrupt_at = None
                manager.interrupt_kernel()
        elif message["msg_type"] == "error":
            printed += content["ename"]
            sys.stderr.write(content["evalue"])
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            break
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == message_id:
            return reply["content"]["status"], printed


START = """
import os, time, warnings
import numpy as np, synk
warnings.simplefilter("error")
synk.fork(2, backend="numpy")
pids = synk.function(lambda row: os.getpid(), outputs=None)
print(*pids(np.ones(2)))
"""
DEFINE = """
@synk.function(outputs="sum")
def f(x):
    return {body}
print(f(np.arange(4.0)))
"""


def start():
    status, printed = run(START)
    assert status == "ok", printed
    return [int(pid) for pid in printed.split()]


def gone(pids):
    return all(harness.wait_until_dead(pid, 10.0) for pid in pids)
'''


def drive(code: str) -> None:
    """Run ``code`` against a kernel, and assert that nothing is left of it."""
    ending = "\nclient.stop_channels()\nmanager.shutdown_kernel(now=False)\nassert gone(pids)\nprint('done')\n"
    result = script(DRIVER + code + ending, timeout=120.0, flags=(), grace_s=10.0)
    result.check("done\n", stderr=None)


CELLS = """
pids = start()
assert run(DEFINE.format(body="x.sum()")) == ("ok", "6.0\\n")
assert run(DEFINE.format(body="10 * x.sum()")) == ("ok", "60.0\\n")
status, printed = run("print(synk.function(lambda x: print('hello') or x.sum(), outputs='sum')(np.arange(4.0)))")
assert status == "ok" and printed.count("hello") == 2 and "[rank 1] hello" in printed and "6.0" in printed, printed
status, printed = run("items = list(synk.map(lambda n: n * n, range(3), progress=True))")
assert status == "ok" and " 3/3 [" in printed and "3 done, 0 failed" in printed, printed
status, printed = run("f(np.ones(4), no_such=1)")
assert status == "error" and "TypeError" in printed, printed
assert run("print(*pids(np.ones(2)))") == ("ok", f"{pids[0]} {pids[1]}\\n")
"""

INTERRUPTED = """
assert run(DEFINE.format(body="x.sum()"))[0] == "ok"
for body in ("time.sleep(100)", "any(False for _ in iter(int, 1))"):
    code = f"synk.function(lambda x: print('here', flush=True) or {body})(np.ones(4))"
    status, printed = run(code, interrupt_at="here")
    assert status == "error" and printed.endswith("KeyboardInterrupt"), printed
    assert run("print(f(np.arange(4.0)))") == ("ok", "6.0\\n")
    assert run("print(*pids(np.ones(2)))") == ("ok", f"{pids[0]} {pids[1]}\\n")
"""

DECORATED = """
import synk

@synk.function(outputs="gather")
def decorated(x):
    return x + 5
"""

CELL = """
import library
from library import helper, decorated
model, offset = library.Model(), 0.0

def here(x):
    return x + offset

def work(x):
    red = 1 if library.Colour(1) is library.Colour.RED and isinstance(model, library.Model) else 0
    return helper(x) + library.registry["plus"](x) + model.step(x) + here(x) * 1000 + red

f = synk.function(work, outputs="gather")
X = np.arange(4.0)

def check():
    np.testing.assert_array_equal(f(X), work(X))
    np.testing.assert_array_equal(f.serial(X), work(X))
    np.testing.assert_array_equal(decorated(X), library.decorated.__wrapped__(X))
    print(f(X)[1], decorated(X)[1])
"""

EDITED = f"""
import pathlib, tempfile

folder = pathlib.Path(tempfile.mkdtemp())
LIBRARY = {LIBRARY + DECORATED!r}

def edit(number, *changes):
    source = LIBRARY
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = folder / "library.py"
    path.write_text(source)
    os.utime(path, (number * 100 + 1e9,) * 2)  # autoreload compares the times of files


edit(1)
assert run(f"import sys; sys.path.insert(0, {{str(folder)!r}}); sys.dont_write_bytecode = True")[0] == "ok"
assert run("%load_ext autoreload\\n%autoreload 2")[0] == "ok"
assert run({CELL!r}) == ("ok", "")
def check(expected):
    assert run("check()") == ("ok", expected + "\\n"), run("check()")
check("1006.0 6.0")
assert run("offset = 3.0") == ("ok", "")
check("4006.0 6.0")
assert run("def here(x):\\n    return x - offset") == ("ok", "")
check("-1994.0 6.0")
edit(2, ("x * rate", "x * rate + 10"), ("x + 1", "x + 51"))
check("-1934.0 6.0")
edit(3, ("x * self.w", "x * self.w + 200"), ("x + 5", "x + 7"), ("rate = 1.0", "rate = 3.0"))
check("-1792.0 8.0")
assert run("library.rate = 9.0") == ("ok", "")
check("-1786.0 8.0")
assert run("print(*pids(np.ones(2)))") == ("ok", f"{{pids[0]}} {{pids[1]}}\\n")
"""

FORKED_AGAIN = """
first = pids
assert run("w = synk.shared(np.ones(2), name='w')")[0] == "ok"
status, printed = run(START)
assert printed.count("\\n") == 2, printed
told, numbers = printed.splitlines()
assert "the cell was run again" in told and "'w'" in told, told
pids = [int(pid) for pid in numbers.split()]
assert not set(first) & set(pids) and gone(first)
status, printed = run(START.replace("fork(2,", "fork(1,"))
assert status == "error" and "SynkError" in printed, printed
assert run("print(*pids(np.ones(2)))") == ("ok", f"{pids[0]} {pids[1]}\\n")
"""


RESTARTED = """
manager.restart_kernel(now=False)
client.wait_for_ready(timeout=60)
assert gone(pids)
pids = start()
manager.signal_kernel(signal.SIGKILL)
"""


def test_notebook_cells() -> None:
    """E: cells run, functions are redefined, the cell that forks is run again. D1: a cell is interrupted. L3: names are
    bound anew, and modules are edited, with ``%autoreload 2``. E: a kernel that restarts or is killed leaves no orphan.
    """
    drive(CELLS + INTERRUPTED + EDITED + FORKED_AGAIN + RESTARTED)
