"""The lines of the check, in order: what each asks, how long it may take, and what to do where it is not ok."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from synk.check import _cpu, _gpu, _machine, _training
from synk.check._found import OK, SKIPPED, SLOW, Found


@dataclass(frozen=True)
class Line:
    """One question.

    Attributes
    ----------
    name, question : str
    measure : callable
        Returns what it has found, or raises. It runs in a process of its own.
    limit_s : float
        That process is killed then.
    if_slow, if_broken : str
        The next step.
    min_gpus : int
        How many GPUs it needs.
    library : str
        A package that it needs; empty for none.
    """

    name: str
    question: str
    measure: Callable[[], Found]
    limit_s: float
    if_slow: str
    if_broken: str
    min_gpus: int = 0
    library: str = ""

    def next_step(self, outcome: str) -> str:
        if outcome == OK:
            return "Nothing to do."
        if outcome == SKIPPED:
            return f'Run it by itself: python -m synk.check --only="{self.name}".'
        return self.if_slow if outcome == SLOW else self.if_broken


_REPORT = "Please report it, with synk-check.json."
_LOAD = "Run the check again when nothing else runs here; if it stays so, report it, with synk-check.json."
_HOST = "Calls still work, through host memory. To find out more run it again with NCCL_DEBUG=INFO, and report it."

DEVICES, NCCL = "GPUs", "NCCL"

LINES = (
    Line("versions", "Which versions are installed?", _machine.versions, 15, "",
         "Install synk with pip, which brings what it needs."),
    Line("machine", "Which cores and how much memory may be used?", _machine.machine, 15, "", _REPORT),
    Line(DEVICES, "Which GPUs can be used, and do they reach each other?", _machine.devices, 30,
         "Collectives go through the host between these GPUs; `nvidia-smi topo -m` shows why.",
         "Install what is named, or see the page on GPUs."),
    Line("workers", "Do workers start, and what does a small call cost?", _cpu.workers, 30, _LOAD,
         "See the page on errors for what is quoted; else report it, with synk-check.json."),
    Line("shared memory", "Do rows go through shared memory at its speed?", _cpu.shared_memory, 30, _LOAD,
         "Give the container more memory; if that does not help, report it, with synk-check.json."),
    Line("signals", "Does Ctrl-C end a call?", _cpu.signals, 20, _LOAD, _REPORT),
    Line("recovery", "Is a worker that dies an error, and replaced?", _cpu.recovery, 30, _LOAD, _REPORT),
    Line("calls on GPUs", "Does each GPU compute, and what does a small call cost?", _gpu.overhead, 45, _LOAD,
         "Try `python -c 'import cupy; print(cupy.arange(3).sum())'` first; if that works, report it.", 1),
    Line("default stream", "Are kernels of other libraries done before an output is copied?", _gpu.default_stream, 30,
         _LOAD, "Call cupy.cuda.Stream.null.synchronize() in such functions. " + _REPORT, 1),
    Line(NCCL, "Is the group of all GPUs joined and proven?", _gpu.group, 90,
         "Only the first call waits for it. " + _LOAD, _HOST, 2),
    Line("bandwidth", "How fast are copies from pageable and pinned memory?", _gpu.bandwidth, 30,
         "Look at the link (`nvidia-smi -q`, PCIe width), and at the limits on locked memory.", _REPORT, 1),
    Line("all-reduce", "Are sums over the GPUs right, and how fast?", _gpu.all_reduce, 40,
         "`nvidia-smi topo -m` shows the links. On one GPU ranks take turns: that is slow by nature.", _HOST, 1),
    Line("death", "Does a death inside a collective end in an error, and does the next call work?", _gpu.death, 45,
         "It works; workers that stick in the driver are killed after 5 s.", _REPORT, 1),
    Line("out of memory", "Is it an error, and does the device work afterwards?", _gpu.out_of_memory, 30, _LOAD,
         "Use fewer rows per call, or num_slices=. " + _REPORT, 1),
    Line("training", "Do replicate and DDP train alike, and how fast?", _training.step_against_ddp, 60, _LOAD, _REPORT,
         library="torch"),
)  # fmt: skip
