"""``synk.torch.process_group``: what is built on it against one process, and every fault in a collective of torch."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gates import say, sign
from support.harness import kill_and_wait, pids
from trainings import Kept, batches, differences, mlp

import synk
from synk.cuda._devices import visible_gpus

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
F = torch.nn.functional
DATA = batches(8, (12, 7, 5, 10))

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")


@pytest.fixture
def shared_runtimes(reuse: Any) -> Kept:
    """Take the place of others' runtimes: the ranks keep the group, and then no loss is checked on trial."""
    return Kept(reuse, "process group", functools.partial(synk.Runtime, backend="numpy"))


def each(rt: synk.Runtime, fn: Callable[..., Any], **options: Any) -> Any:
    """Return a function that all ranks run, with a list of what each returns."""
    return rt.function(fn, per_rank=True, outputs=None, framework="torch", **options)


def summed(action: str = "", rank: int = 1, name: str = "") -> Any:
    """Add up over the group the numbers of the ranks, from 1; or let something befall one of them on the way."""
    group = synk.torch.process_group()
    value = torch.full((3,), group.rank() + 1.0)
    within = dist.new_group([0, 1]) if action == "all wait within" else None
    if group.rank() == rank:
        if action == "raise":
            raise ArithmeticError("on purpose")
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if name:
            say(name)
        if action == "hang":
            time.sleep(3600)
    if action.startswith("all wait"):  # each for a message that nobody sends
        dist.recv(value, src=(group.rank() + 1) % group.size(), group=within)
    dist.all_reduce(value)
    return value.tolist()


def test_it_is_kept_between_calls_and_runtimes_have_each_their_own(shared_runtimes: Any) -> None:
    runtimes = shared_runtimes[2], shared_runtimes[3]
    calls = [each(rt, summed) for rt in runtimes]
    for _ in range(2):
        assert [call()[-1] for call in calls] == [[3.0] * 3, [6.0] * 3]
    known = each(runtimes[0], lambda: id(synk.torch.process_group()))
    assert known() == known() == each(runtimes[0], lambda: id(dist.group.WORLD))()
    assert [call.result()[0] for call in [call.submit() for call in calls]] == [[3.0] * 3, [6.0] * 3]


# ----- against one process


def serial(count: int) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = mlp(1, torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in DATA[:count]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


class Sharded:
    """Functions of a model that is divided among the ranks, each of which keeps its part."""

    def __init__(self, rt: synk.Runtime) -> None:
        held = rt.resident(types.SimpleNamespace(group=None))

        def parts() -> tuple[Any, Any]:
            from torch.distributed.fsdp import fully_shard  # above it would take each worker of this file a second

            group, own = synk.torch.process_group(), held.value
            if own.group is not group:
                mesh = dist.init_device_mesh("cpu", (group.size(),))
                _, model = serial(0)
                for layer in model:
                    fully_shard(layer, mesh=mesh)
                own.group, own.model = group, fully_shard(model, mesh=mesh)
                own.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return own.model, own.optimizer

        def step(x: Any, y: Any) -> Any:
            model, optimizer = parts()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            comm = synk.comm
            (loss * (comm.rows * comm.world_size / comm.total_rows)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        def look() -> Any:
            model, _ = parts()
            local = sum(parameter.to_local().numel() for parameter in model.parameters())
            return local, [parameter.full_tensor().detach() for parameter in model.parameters()]

        self.step = rt.function(step, framework="torch", outputs="avg")
        self.look = each(rt, look)

    def train(self, first: int, end: int) -> list[float]:
        return [float(self.step(*rows)) for rows in DATA[first:end]]


def test_fsdp_is_training_in_one_process(shared_runtimes: Any) -> None:
    """With clipping, and with rows that cannot be divided equally."""
    expected, model = serial(8)
    for workers in (2, 3):
        sharded = Sharded(shared_runtimes[workers])
        assert differences(expected, sharded.train(0, 8), 1e-12) == []
        sizes, found = zip(*sharded.look())
        assert max(sizes) < sum(sizes) == sum(parameter.numel() for parameter in model.parameters())
        assert all(differences(list(model.parameters()), of_rank, 1e-12) == [] for of_rank in found)


def test_parallel_layers_compute_what_plain_ones_do(shared_runtimes: Any) -> None:
    """Their weights are DTensors, divided by columns and by rows."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def compute() -> Any:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = dist.init_device_mesh("cpu", (synk.torch.process_group().size(),))
        model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        out = model(x)
        out.square().sum().backward()
        return out.detach(), model[0].weight.grad.full_tensor()

    model = mlp()
    out = model(x)
    out.square().sum().backward()
    for found in each(shared_runtimes[2], compute)():
        assert differences((out, model[0].weight.grad), found, 1e-12) == []


# ----- faults

WAITS = ("hang", "all wait", "all wait within")


def test_a_fault_ends_the_wait_and_the_next_call_works(subtests: Any, shared_runtimes: Any, tmp_path: Path) -> None:
    """An exception elsewhere, a death, a time limit and Ctrl-C; only a death costs a worker."""
    rt = shared_runtimes[2]
    add = each(rt, summed, bcast_inputs=("action", "rank", "name"))
    add("", 0, "")  # the ranks have imported torch and made the group: a time limit may not break that off
    expected: dict[str, Any] = {
        "raise": pytest.raises(ArithmeticError, match="on purpose"),
        "kill": pytest.raises(synk.errors.WorkerDied),
        "limit": pytest.raises(synk.errors.CallTimeout),
        "ctrl-c": pytest.raises(KeyboardInterrupt),
    }
    cases = [(what, what, rank) for what in ("raise", "kill") for rank in (0, 1)]
    cases += [*(("limit", action, 1) for action in WAITS), ("ctrl-c", "all wait within", 1)]
    for number, (what, action, rank) in enumerate(cases):
        with subtests.test(what=what, action=action, rank=rank):
            before, name = pids(rt), sign(tmp_path / str(number)) if what == "ctrl-c" else ""
            pressed = threading.Thread(target=press_ctrl_c_when_it_is_said, args=(name,))
            if name:
                pressed.start()
            with expected[what] as caught:
                add(action, rank, name, timeout=1.0 if what == "limit" else None)
            if name:
                pressed.join()
            assert what != "kill" or caught.value.ranks == (rank,)
            assert what == "kill" or pids(rt) == before
            assert add("", 0, "") == [[3.0] * 3] * 2


def press_ctrl_c_when_it_is_said(name: str) -> None:
    os.close(os.open(name, os.O_RDONLY))
    os.kill(os.getpid(), signal.SIGINT)


def test_a_death_between_calls_makes_it_anew(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    sharded = Sharded(rt)
    expected, _ = serial(2)
    assert differences(expected, sharded.train(0, 2), 1e-12) == []
    kill_and_wait(pids(rt)[1])
    assert differences(expected, sharded.train(0, 2), 1e-12) == []  # made anew, from the start


def watched() -> None:
    """Have this rank note when it aborts the group, and when it cuts a connection."""
    synk.torch.process_group()
    events = dist.synk_events = []

    def noted(event: str, act: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (events.append(event), act(*args))[1]  # type: ignore[func-returns-value]

    place = dist.distributed_c10d
    place._abort_process_group = noted("abort", place._abort_process_group)
    socket.socket.shutdown = noted("cut", socket.socket.shutdown)  # type: ignore[method-assign]


def test_a_group_is_aborted_before_its_connections_are_cut(runtime: Any) -> None:
    """Threads of NCCL would report the broken connections and end the process. Gloo, which runs here, does not mind."""
    rt = runtime(3, backend="numpy")
    each(rt, watched)()
    with pytest.raises(synk.errors.WorkerDied):
        each(rt, lambda: [summed(), summed("kill")])()  # all are in the group when it happens
    events = each(rt, lambda: getattr(dist, "synk_events", [])[:1])()
    assert events == [["abort"], [], ["abort"]]
    assert each(rt, summed)()[0] == [6.0] * 3


# ----- ports and refusals


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process listens, as the kernel tells."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    found = []
    for family in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]]
        found += [f"{family} {row[1]}" for row in rows if row[9] in sockets and (row[3] == "0A" or "udp" in family)]
    return found


def test_nothing_listens_outside_of_loopback(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # not even where the user's environment says so
    rt = runtime(2)
    assert [listening(pid) for pid in pids(rt)] == [[], []]

    def within() -> None:
        synk.torch.process_group()
        dist.barrier(group=dist.new_group([0, 1]))

    each(rt, within)()
    for pid in pids(rt):
        found = listening(pid)
        assert found and all(entry.startswith("tcp 0100007F:") for entry in found), found


def test_wrong_uses(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with pytest.raises(ValueError, match="cannot make a process group in the program"):
        synk.torch.process_group()

    def rows(x: np.ndarray) -> int:
        return synk.torch.process_group().size()

    def mistake() -> None:
        synk.torch.process_group()
        dist.all_reduce(torch.zeros(2), group=dist.new_group([0, 1]), op="sum")

    assert rt.function(rows, outputs=None)(np.zeros(2)) == [2, 2]
    for call in (lambda: rt.function(rows, outputs=None)(np.zeros(1)), lambda: rt.function(rows).serial(np.zeros(4))):
        with pytest.raises(ValueError, match="got a call that 1 of 2 workers run"):
            call()
    with pytest.raises((RuntimeError, TypeError, AttributeError)) as caught:
        each(rt, mistake)()
    assert not isinstance(caught.value, synk.errors.SynkError)
    assert each(rt, summed)()[0] == [3.0] * 3


@pytest.mark.multi_gpu
def test_on_gpus_tensors_go_by_nccl_and_fsdp_trains(runtime: Any) -> None:
    """Not run yet: no such machine was there."""
    if len(visible_gpus().devices) < 2:
        pytest.skip("needs two GPUs")

    def compute() -> Any:
        from torch.distributed.fsdp import fully_shard

        group = synk.torch.process_group()
        value, host = torch.full((3,), group.rank() + 1.0, device="cuda"), torch.ones(2)
        dist.all_reduce(value)
        dist.all_reduce(host)  # by gloo
        model = fully_shard(mlp().to("cuda"), mesh=dist.init_device_mesh("cuda", (group.size(),)))
        model(torch.ones(3, 5, dtype=torch.float64, device="cuda")).sum().backward()
        return value.cpu(), host, model[0].weight.grad.full_tensor().cpu()

    model = mlp()
    model(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
    for found in each(runtime(2, backend="cupy"), compute)():
        assert differences((torch.full((3,), 3.0), torch.full((2,), 2.0), model[0].weight.grad), found, 1e-12) == []
