"""The bare loop: what a call costs with nothing around it.

A master and forked workers, a pipe down and a pipe up for each, anonymous shared memory, one check of type and shape,
the function, a slot for each output, a weighted sum. No errors, no deaths, no other signature than the first: the limit
of what synk can reach on a machine.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import struct
from typing import Any

import numpy as np

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve

DOORBELL = struct.Struct("<Q")
CALL, REDUCE = 1, 2
LARGE_NBYTES = 1 << 18  # from here on every worker reduces its own part of an output

Array = np.ndarray[Any, Any]


class Team:
    """Forked workers that hold their rows and share memory for ``w``, ``x``, ``y`` and the outputs with the master."""

    def __init__(self, job: str, params: dict[str, int]) -> None:
        self.function = _work.function_of(job, **params)
        rows = _work.rows_of(job)
        parts = [_work.shard(rows, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
        self.weights = [len(x) for x, _ in parts]
        w = _work.fresh_weights(0)
        self.w = shared_like(w)
        self.passed = [tuple(map(shared_like, part)) for part in parts] if job == "linear passed" else None
        outputs = self.function(w, *parts[0])
        self.is_tuple = isinstance(outputs, tuple)
        self.outputs = [np.asarray(value) for value in (outputs if self.is_tuple else (outputs,))]
        self.slots = [[shared_like(value) for value in self.outputs] for _ in parts]
        self.results = [shared_like(value) for value in self.outputs]
        self.pipes: list[tuple[int, int]] = []
        self.poll = select.poll()
        self.pids = [self.start(rank, *part) for rank, part in enumerate(self.passed or parts)]

    def start(self, rank: int, x: Array, y: Array) -> int:
        """Fork a worker and return its process id."""
        (down_read, down_write), (up_read, up_write) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in (down_write, up_read, *(fd for pair in self.pipes for fd in pair)):
                os.close(fd)
            self.work(rank, x, y, down_read, up_write)
            os._exit(0)
        os.close(down_read)
        os.close(up_write)
        self.pipes.append((down_write, up_read))
        self.poll.register(up_read, select.POLLIN)
        return pid

    def work(self, rank: int, x: Array, y: Array, down: int, up: int) -> None:
        """Answer the master until it hangs up."""
        slots, values = self.slots[rank], []
        while message := os.read(down, 8):
            if DOORBELL.unpack(message)[0] == CALL:
                result = self.function(self.w, x, y)
                values = [np.asarray(value) for value in (result if self.is_tuple else (result,))]
                for value, slot in zip(values, slots):
                    assert value.dtype == slot.dtype and value.shape == slot.shape
                    if value.nbytes < LARGE_NBYTES:
                        slot[...] = value
                    else:  # the parts that others reduce
                        for peer, (start, stop) in enumerate(chunks(value)):
                            if peer != rank:
                                slot[start:stop] = value[start:stop]
            else:
                for leaf, value in enumerate(values):
                    if value.nbytes >= LARGE_NBYTES:
                        start, stop = chunks(value)[rank]
                        others = [self.slots[peer][leaf] for peer in range(WORLD_SIZE) if peer != rank]
                        self.reduce([value, *others], self.results[leaf], start, stop)
            os.write(up, DOORBELL.pack(0))

    @staticmethod
    def reduce(sources: list[Array], target: Array, start: int, stop: int, block: int = 1 << 16) -> None:
        """Average in blocks that stay in the cache."""
        scale = target.dtype.type(1 / len(sources))
        for low in range(start, stop, block):
            part = slice(low, min(low + block, stop))
            out = target[part]
            np.copyto(out, sources[0][part])
            for source in sources[1:]:
                np.add(out, source[part], out=out)
            out *= scale

    def exchange(self, message: int) -> None:
        """Send one message to each worker and wait for all answers."""
        data = DOORBELL.pack(message)
        for down, _ in self.pipes:
            os.write(down, data)
        pending = len(self.pipes)
        while pending:
            for fd, _ in self.poll.poll():
                if not os.read(fd, 8):
                    raise RuntimeError("a worker has ended")
                pending -= 1

    def call(self, w: Array) -> list[Any]:
        """Run the function on all shards and return the averaged outputs."""
        assert type(w) is np.ndarray and w.dtype == self.w.dtype and w.shape == self.w.shape
        self.w[...] = w
        self.exchange(CALL)
        if any(output.nbytes >= LARGE_NBYTES for output in self.outputs):
            self.exchange(REDUCE)
            return self.results
        total = sum(self.weights)
        return [sum(slot * (weight / total) for slot, weight in zip(leaf, self.weights)) for leaf in zip(*self.slots)]

    def close(self) -> None:
        """End the workers."""
        for down, up in self.pipes:
            os.close(down)
            os.close(up)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids, self.pipes = [], []


def shared_like(value: Any) -> Array:
    """Return a copy of ``value`` in anonymous memory that forked processes share."""
    array = np.asarray(value)
    memory = np.frombuffer(mmap.mmap(-1, max(array.nbytes, 1)), array.dtype, count=array.size).reshape(array.shape)
    memory[...] = array
    return memory


def chunks(array: Array) -> list[tuple[int, int]]:
    """Return which part of an output each rank reduces."""
    bounds = [len(array) * rank // WORLD_SIZE for rank in range(WORLD_SIZE + 1)]
    return list(itertools.pairwise(bounds))


_team: list[Team] = []


def prepare(job: str, **params: int) -> Call:
    """Fork workers for ``job``; those of the job before end."""
    while _team:
        _team.pop().close()
    team = Team(job, params)
    _team.append(team)
    x, y = _work.inputs(_work.rows_of(job))
    passed = team.passed

    def call(number: int) -> float | None:
        if passed is not None:
            parts = zip(np.array_split(x, WORLD_SIZE), np.array_split(y, WORLD_SIZE))
            for (to_x, to_y), (from_x, from_y) in zip(passed, parts):
                to_x[...], to_y[...] = from_x, from_y
        team.call(_work.fresh_weights(number))
        return max(float(slots[2]) for slots in team.slots) if team.is_tuple else None

    return call


if __name__ == "__main__":
    serve({"call": prepare}, version=np.__version__)
    while _team:
        _team.pop().close()
