"""A plugin of pytest: tests that failed run once more at the end, alone (``make test``).

What passes then is listed as ``FLAKY``, with its first traceback, and does not fail the run. What fails again does. A
run that was cut short (Ctrl-C, ``-x``, a file that cannot be imported) is reported as it is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from _pytest.terminal import TerminalReporter

ENOUGH = 10
"""That many tests that fail again are no matter of luck: the others count as failed without another try."""

NOTED = "cache/lastfailed"
"""Where pytest notes, for ``--last-failed``, the tests that failed and have not passed since."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and getattr(config, "cache", None):  # not in the processes of xdist
        config.pluginmanager.register(OnceMore(config))


class OnceMore:
    """Decides, before pytest sums up, which failures count."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._flaky: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True, trylast=True)  # when the processes of xdist have ended, before the summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        failures = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, ())]
        is_whole = session.exitstatus == pytest.ExitCode.TESTS_FAILED and not session.shouldfail
        if not is_whole or not failures or not self._noted().issuperset(report.nodeid for report in failures):
            return
        status = self._run_again(reporter)
        again = self._noted()
        for kind in ("failed", "error"):
            left = [report for report in reporter.stats.pop(kind, ()) if report.nodeid in again]
            reporter.stats.update({kind: left} if left else {})
        first = {report.nodeid: report for report in reversed(failures) if report.nodeid not in again}
        self._flaky = [first[name] for name in sorted(first)]
        if self._flaky:
            reporter._add_stats("flaky", self._flaky)
        if status == pytest.ExitCode.INTERRUPTED or again.isdisjoint(report.nodeid for report in failures):
            session.exitstatus = status

    def _noted(self) -> set[str]:
        return set(self._config.cache.get(NOTED, {}))

    def _run_again(self, reporter: TerminalReporter) -> int:
        """Run what pytest has noted as failed, with the same arguments in one process. Return its exit status."""
        reporter.ensure_newline()
        reporter.section("what failed, once more, alone")
        own = ["-p", f"no:{__name__}", "-n", "0", "--last-failed", "--last-failed-no-failures=none"]
        own += [f"--maxfail={ENOUGH}", "--tb=no", "-q", "--junit-xml="]  # a file of results is of the first run
        parameters = self._config.invocation_params
        with subprocess.Popen([sys.executable, "-m", "pytest", *parameters.args, *own], cwd=parameters.dir) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:  # which reached the other process, too
                process.wait()
                return pytest.ExitCode.INTERRUPTED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after all other sections
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> Iterator[None]:
        yield
        for report in self._flaky:
            terminalreporter.write_line(f"FLAKY {report.nodeid}", yellow=True)
            terminalreporter.write_line(report.head_line or "")  # which names the case of a table
            terminalreporter.write_line(report.longreprtext)
            for title, content in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(content)
