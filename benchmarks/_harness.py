"""Starts peers, measures them in interleaved blocks, and watches what else the machine is doing.

Only ratios taken within one block of time mean anything: the speed of a core drifts. So runtimes are measured in turns,
``synk peer synk peer``, and what is reported is the median of the ratios of neighbours. A block during which other
processes took more than ``max_noise`` of a core, or the hypervisor as much, is repeated, and marked if it stays noisy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


Case = dict[str, "str | int"]  # the parameters of a job


class PeerError(RuntimeError):
    """A peer could not start, failed in a job, or did not answer."""


@dataclass(frozen=True)
class Spec:
    """How to start a peer.

    Attributes
    ----------
    launch : str
        ``"single"``: one process; ``"ranks"``: as many as workers, told apart by the environment; ``"mpiexec"``.
    requires : tuple of str
        Modules without which it is "not installed".
    """

    name: str
    module: str
    launch: str = "single"
    requires: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    one_thread: bool = True


SYNK = Spec("synk", "synk_calls", requires=("synk",), one_thread=False)
IDEAL = Spec("ideal", "processes", "ranks")
BARE = Spec("bare loop", "bare")
POOL = Spec("multiprocessing.Pool", "pool")
MPI = Spec("mpi4py (mpich)", "mpi", "mpiexec", ("mpi4py",))
GLOO = Spec("torch gloo", "gloo", "ranks", ("torch",), {"GLOO_SOCKET_IFNAME": "lo"})
JAX = Spec(
    "jax pmap",
    "jax_pmap",
    requires=("jax",),
    env={"XLA_FLAGS": "--xla_force_host_platform_device_count={world_size}", "JAX_PLATFORMS": "cpu"},
    one_thread=False,
)
PEERS = (
    BARE,
    POOL,
    MPI,
    GLOO,
    JAX,
    Spec("ProcessPoolExecutor", "pool", env={"SYNK_BENCHMARK_VARIANT": "executor"}),
    Spec("joblib (loky)", "joblib_loky", requires=("joblib",)),
    Spec("ray actors", "ray_actors", requires=("ray",), env={"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}),
    Spec("dask futures", "dask_futures", requires=("distributed",)),
    Spec("serial NumPy, 1 thread", "serial"),
    Spec("serial NumPy, all threads", "serial", one_thread=False),
)


class Noise:
    """How much processor time others took, from /proc: own processes are known by a mark in their environment."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._own: dict[tuple[str, str], bool] = {}
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._start = self._read()

    def start(self) -> None:
        """Begin to measure."""
        self._start = self._read()

    def stop(self) -> float:
        """Return the cores that others used since ``start``, the hypervisor's theft included."""
        (begin, used), (end, used_now) = self._start, self._read()
        return max(0.0, used_now - used) / self._ticks_per_s / (end - begin)

    def _read(self) -> tuple[float, int]:
        ticks = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has ended; its parent has inherited its time
                continue
            if not self._is_own(pid, fields[19].decode()):
                ticks += sum(map(int, fields[11:15]))  # user and system time, of itself and of its dead children
        with open("/proc/stat", encoding="ascii") as file:
            ticks += int(file.readline().split()[8])  # stolen by the hypervisor
        return time.perf_counter(), ticks

    def _is_own(self, pid: str, start_time: str) -> bool:
        key = (pid, start_time)
        if key not in self._own:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    self._own[key] = int(pid) == os.getpid() or self._mark in file.read()
            except OSError:
                return False
        return self._own[key]


@dataclass
class Harness:
    """What a run has in common: options, the mark of own processes, the noise probe, the scratch directory."""

    world_size: int = 2
    rounds: int = 3
    block_s: float = 0.5
    max_noise: float = 0.15
    tries: int = 3
    quick: bool = False
    interpreters: Sequence[str] = ()
    only_peers: Sequence[str] = ()  # how their names begin; none for all

    def __post_init__(self) -> None:
        mark = f"SYNK_BENCHMARK_RUN={os.getpid()}-{time.time_ns()}"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "SYNK_BENCHMARK_WORLD_SIZE": str(self.world_size)}
        self.env["SYNK_BENCHMARK_RUN"] = mark.partition("=")[2]
        self.noise = Noise(mark)
        self.scratch = Path(tempfile.mkdtemp(prefix="synk-benchmarks-"))
        self.versions: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self._python_of: dict[tuple[str, ...], str | None] = {}

    @property
    def chosen_peers(self) -> list[Spec]:
        """The peers to compare with."""
        return [spec for spec in PEERS if not self.only_peers or spec.name.startswith(tuple(self.only_peers))]

    def close(self) -> None:
        """Remove the scratch directory."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def python_for(self, requires: tuple[str, ...]) -> str | None:
        """Return the first interpreter that has all modules, or None."""
        if requires not in self._python_of:
            test = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {requires!r})))"
            found = (
                python
                for python in (sys.executable, *self.interpreters)
                if subprocess.run([python, "-c", test], cwd=ROOT, env=self.env, check=False).returncode == 0
            )
            self._python_of[requires] = next(found, None)
        return self._python_of[requires]

    def script(self, module: str, *args: str) -> Any:
        """Run ``python -m benchmarks.MODULE`` to its end and return the JSON it prints last."""
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *args],
            cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=REQUEST_TIMEOUT_S * 5, check=False,
        )  # fmt: skip
        if done.returncode:
            raise PeerError(f"{module} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        return json.loads(done.stdout.splitlines()[-1])

    def progress(self, text: str) -> None:
        """Say on standard error what is being measured."""
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    @contextmanager
    def baselines(self) -> Iterator[list[Peer]]:
        """Start the ideal and synk; where synk does not start, say so and go on with the peers alone."""
        with self.peers(IDEAL) as peers, ExitStack() as stack:
            try:
                peers += stack.enter_context(self.peers(SYNK))
            except PeerError as error:
                self.failures[SYNK.name] = str(error)
            yield peers

    def versus(
        self, spec: Spec, baselines: Sequence[Peer], request: str, cases: Mapping[str, Case], results: dict[str, Any]
    ) -> float | None:
        """Measure one round of all cases on a peer next to the baselines; return the seconds it took to start.

        ``results[case][peer]`` grows by what ``turns`` returns, or becomes the text of what went wrong.
        """
        table = [results.setdefault(case, {}) for case in cases]
        try:
            with self.peers(spec) as (peer,):
                for (case, params), column in zip(cases.items(), table, strict=True):
                    if isinstance(column.setdefault(spec.name, []), str):  # it has failed before
                        continue
                    self.progress(f"{spec.name}: {case}")
                    try:
                        for runtime in (*baselines, peer):
                            runtime.prepare(request, **params)
                        column[spec.name].append(self.turns((*baselines, peer)))
                    except PeerError as error:
                        column[spec.name] = f"failed: {error}"
                return peer.start_s
        except PeerError as error:
            for column in table:
                column[spec.name] = column.get(spec.name) or str(error)
        return None

    @contextmanager
    def peers(self, *specs: Spec) -> Iterator[list[Peer]]:
        """Start peers and end them."""
        with ExitStack() as stack:
            yield [stack.enter_context(Peer(self, spec)) for spec in specs]

    def turns(self, peers: Sequence[Peer], *, block_s: float | None = None) -> dict[str, dict[str, Any]]:
        """Measure the prepared job on each peer in turn, there and back, as often as the noise demands.

        Returns
        -------
        dict
            Peer name to its ``call_s`` (median), ``share`` of the call spent in the user's function if known,
            ``calls``, and under ``"noise"`` the worst of the blocks.
        """
        block_s = block_s or self.block_s
        counts = {peer.name: peer.calls_in(block_s) for peer in peers}
        for attempt in range(self.tries):
            if attempt:
                time.sleep(1.0)
            blocks: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
            noise = 0.0
            for peer in (*peers, *reversed(peers)):
                self.noise.start()
                blocks[peer.name].append(peer.run(counts[peer.name]))
                noise = max(noise, self.noise.stop())
            if noise <= self.max_noise:
                break
        return {"noise": {"cores": noise}, **{name: _summary(both) for name, both in blocks.items()}}


def _summary(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the blocks of one peer: the median call, and of the ideal's ranks the slowest."""
    ranks = range(len(blocks[0]["call_s"]))
    by_rank = [statistics.median([s for block in blocks for s in block["call_s"][rank]]) for rank in ranks]
    summary: dict[str, Any] = {"call_s": max(by_rank), "calls": sum(len(block["call_s"][0]) for block in blocks)}
    if blocks[0]["inner_s"][0][0] is not None:
        pairs = [
            (call, max(inner))  # the ranks of a peer go in step: the slowest one decides
            for block in blocks
            for call, *inner in zip(block["call_s"][0], *block["inner_s"], strict=True)
        ]
        summary["inner_s"] = statistics.median(max(inner) for _, *inner in pairs)
        summary["share"] = statistics.median(inner / call for call, inner in pairs)
        summary["outside_s"] = statistics.median(call - inner for call, inner in pairs)
    return summary


class Peer:
    """A running peer: one process or one per rank, each with a connection on which it answers."""

    def __init__(self, harness: Harness, spec: Spec) -> None:
        python = harness.python_for(spec.requires)
        if python is None:
            raise PeerError("not installed")
        self.name, self.spec, self._harness, self._python = spec.name, spec, harness, python
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[TextIO] = []

    def __enter__(self) -> Peer:
        world_size = self._harness.world_size
        number_of_ranks = 1 if self.spec.launch == "single" else world_size
        directory = Path(tempfile.mkdtemp(dir=self._harness.scratch))
        self._log = directory / "log"
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(str(directory / "socket"))
            listener.listen()
            listener.settimeout(REQUEST_TIMEOUT_S)
            try:
                for command, env in self._commands(str(directory / "socket")):
                    self._processes.append(
                        subprocess.Popen(
                            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            start_new_session=True,
                        )
                    )  # fmt: skip
                hellos = [self._accept(listener) for _ in range(number_of_ranks)]
            except BaseException:
                self.__exit__(None, None, None)
                raise
        hellos.sort(key=lambda pair: pair[0]["rank"])
        self._streams = [stream for _, stream in hellos]
        self.start_s = max(hello["start_s"] for hello, _ in hellos)
        self._harness.versions[self.name] = hellos[0][0]["version"]
        return self

    def _commands(self, address: str) -> Iterator[tuple[list[str], dict[str, str]]]:
        world_size = self._harness.world_size
        env = {**self._harness.env, **(ONE_THREAD if self.spec.one_thread else {})}
        env |= {name: value.format(world_size=world_size) for name, value in self.spec.env.items()}
        env |= {"SYNK_BENCHMARK_SOCKET": address, "SYNK_BENCHMARK_LAUNCHED": repr(time.time())}
        command = [self._python, "-m", f"benchmarks.peers.{self.spec.module}"]
        if self.spec.launch == "mpiexec":
            mpiexec = shutil.which("mpiexec", path=f"{Path(self._python).parent}{os.pathsep}{env['PATH']}")
            if mpiexec is None:
                raise PeerError("not installed: no mpiexec")
            yield [mpiexec, "-n", str(world_size), *command], env
        elif self.spec.launch == "ranks":
            for rank in range(world_size):
                yield command, {**env, "SYNK_BENCHMARK_RANK": str(rank)}
        else:
            yield command, env

    def _accept(self, listener: socket.socket) -> tuple[dict[str, Any], TextIO]:
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        listener.settimeout(0.2)
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(REQUEST_TIMEOUT_S)
            with connection:
                stream = connection.makefile("rw", encoding="utf-8")
            return json.loads(stream.readline()), stream
        raise PeerError(f"did not start: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            for stream in self._streams:
                print(json.dumps(request), file=stream, flush=True)
            answers = [json.loads(stream.readline()) for stream in self._streams]
        except (OSError, ValueError) as error:
            raise PeerError(f"{self.name} gave no answer ({type(error).__name__}): {self._last_words()}") from error
        for answer in answers:
            if "error" in answer:
                raise PeerError(f"{self.name}: {answer['error']}")
        return answers

    def prepare(self, job: str, /, **params: Any) -> None:
        """Get ready for ``job``."""
        self._ask({"prepare": job, "params": params})

    def run(self, calls: int) -> dict[str, Any]:
        """Make so many calls; return the seconds of each, by rank."""
        answers = self._ask({"calls": calls})
        return {key: [answer[key] for answer in answers] for key in ("call_s", "inner_s")}

    def calls_in(self, block_s: float) -> int:
        """Return how many calls take about ``block_s``, from a few that also warm up."""
        self.run(2)
        call_s = statistics.median(self.run(3)["call_s"][0])
        return max(3, min(3000, int(block_s / call_s)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.close()  # the peer reads the end of its requests and leaves
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S if kind is None and self._streams else 0.1)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
