"""One rank: what it holds, by number, and how it answers an order. Everything else on a rank is handed this object.

In one file because it is one object: functions, ``synk.comm`` and the wings find all else through it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from synk._pure.environment import merged
from synk._rank.call import RankPlan, RankQuestion
from synk._rank.failpoints import nothing
from synk._rank.failures import dumps, pack_failure
from synk._rank.functions import LoadedFunction
from synk._rank.items import RankItems
from synk._rank.outputs import RankDestination, RankReduction
from synk._rank.pages import own_bytes
from synk._rank.peers import Peers, RankLane
from synk._rank.process import drop_frames, end_copy, must_go_on
from synk._rank.received import Received
from synk._rank.residents import Changes, RankResidents
from synk._rank.settings import Settings
from synk._rank.variables import Replica, VariableStore
from synk._wire import orders as wire
from synk._wire.cell import cell
from synk._wire.logs import set_levels
from synk._wire.mapping import Descriptor
from synk._wire.memory import Segment
from synk._wire.orders import NUM_LANES, Down, Phase, Up
from synk.backends import Backend
from synk.communicators._collectives import Collectives
from synk.errors import ReentrancyError

_INTERRUPT, _PHASE = int(Down.INTERRUPT), int(Up.PHASE)
_IDLE, _FUNCTION, _PUBLISHING, _LOADING = (
    int(each) for each in (Phase.IDLE, Phase.FUNCTION, Phase.PUBLISHING, Phase.LOADING)
)
_BEFORE_PARCELS = ("memory", "variable", "resident")

Answer = tuple[int, Any, Sequence[Segment]]
"""The status of a reply, its body, and the memory that goes with it."""


class Interrupted(KeyboardInterrupt):
    """The program asked this worker to end its call."""


class Rank:
    """What a rank holds, and how it answers.

    Attributes
    ----------
    held : dict of int to object
        Memory, plans, questions, by number.
    functions : dict of int to LoadedFunction
    slots, told_slots : dict of int to Segment
        By lane: the memory of its outputs, and that of which the program knows.
    changes : Changes
        What the last call that changes resident objects has done to them.
    lane : RankLane
        That of the current call.
    mapped : LoadedFunction or None
        The function of a map, while this rank runs some of its items.
    seed : sequence of int
        The runtime's seed, then the key of this rank's own stream.
    is_far, has_other_nodes : bool
        Whether it runs on a node, which may be another machine than the program's, and whether there are others.
    running : int
        The number of the order whose user code runs: only that may be interrupted.
    is_copy : bool
        Whether a function has forked this process: the child is no rank.
    is_held, is_due : bool
        Whether a first interrupt waits for the end of a step (see ``hold_back``), and whether one waits now.
    """

    plan_type: type[RankPlan] = RankPlan
    reduction_type: type[RankReduction] = RankReduction
    replica_type: type[Replica] = Replica

    questions: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {
        "dump": lambda rank, asked: rank.dumped(*asked),
        "wires": lambda rank, wires: rank.peers.wire(wires),
        "outcomes": lambda rank, number: rank.changes.outcomes(number),
        "prepare": lambda rank, function: rank.prepare(rank.functions[function]),
        "back": lambda rank, destination: rank.held[destination].bring_back(rank),
    }
    """What answers each kind of question, from what it brings."""

    peek: Callable[[], bytes] = staticmethod(lambda: b"")
    """Returns the next order if it has come, and leaves it where it is."""

    interrupts: type[BaseException] = Interrupted
    """What ends a call: in a rank that is played by the program itself, every Ctrl-C."""

    thread: int | None = None
    """The thread that runs functions, in a rank that is played by the program itself. None: the process is a worker."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: Backend,
        control: Segment,
        eventfds: Sequence[int],
        nodes: Sequence[int] = (),
        host: str = "",
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, backend.device
        self.is_far, self.has_other_nodes, self.host = bool(nodes), len(nodes) > 1, host
        self.backend: Any = backend
        self.lanes = [RankLane(index, rank, world_size, control) for index in range(NUM_LANES)]
        self.lane = self.lanes[0]
        self.down, self.up = self.lane.down, self.lane.up
        self._own_down, self.own_up = memoryview(self.down[rank]), memoryview(self.up[rank])
        self.own_up[_PHASE] = _IDLE
        self.held: dict[int, Any] = {}
        self.functions: dict[int, LoadedFunction] = {}
        self._received = Received(self._own_memory)
        self._parcels: set[int] = set()
        self.variables = VariableStore(rank, self.backend, self.replica_type, is_far=self.is_far)
        self.residents = RankResidents()
        self.settings = Settings()
        of_all = rank, world_size, self.backend, self.down, self.up, eventfds
        if self.has_other_nodes:
            from synk._rank.nodes import FarPeers  # ranks of one machine need no wires

            self.peers: Peers = FarPeers(nodes, host, *of_all)
        else:
            self.peers = Peers(*of_all)
        self.own_path: list[str] = []  # on another machine than the program's, where imports find what is there
        self.slots: dict[int, Segment] = {}
        self.told_slots: dict[int, Segment] = {}
        self.changes = Changes()
        self.running = 0
        self.received_ns = self.began_ns = self.ended_ns = self.waited_ns = 0
        self.failpoint: Callable[[str], None] = nothing
        self.mapped: LoadedFunction | None = None
        self.items: RankItems | None = None
        self.process_group: Any = None
        self.seed: Sequence[int] = (0,)
        self.is_copy = False
        self.broken_off = 0  # the order whose news were not taken in to their end
        self.num_messages = self.num_collectives = 0
        self._num_deferred = 0
        self._is_shielded = self.is_held = self.is_due = False

    # -- answering ----------------------------------------------------------------------------------------------------

    def answer(self, order: bytes, body: Any, fds: list[Descriptor]) -> Answer:
        """Answer an order."""
        number, plan, committed, ended, in_place, _ = wire.ORDER.unpack_from(order)
        self.num_messages += 1
        self.received_ns = self.began_ns = self.ended_ns = time.monotonic_ns()
        self.waited_ns = 0
        held: Any = None
        note: Callable[[], None] | None = None
        outer, cell.worker = cell.worker, self
        try:
            try:
                if self.changes.undo:
                    self.changes.settle(committed, ended)
                if body is not None or (self.broken_off and plan > 0):
                    try:
                        self._learn(number, body, fds)
                    except self.interrupts:
                        raise
                    except BaseException as error:
                        self.end_if_copy(error)
                        return wire.UNREAD, self._failure(error), ()
                if plan <= 0:
                    self._say(plan)
                    return wire.DONE, None, ()
                held = self.held[plan]
                self.failpoint("call.received")
                status, content, segments, note = held.answer(self, number, in_place, wire.ROWS.unpack_from(order, 48))
                self.end_if_copy()
                self.failpoint("call.published")
                self.running = 0
            except self.interrupts as error:
                self.end_if_copy(error)
                self._give_up(number)
                return wire.INTERRUPTED, None, ()
            except BaseException as error:
                self.running = 0
                self.end_if_copy(error)
                failure = self._failure(error)
                self._give_up(number, failure.traceback_text)
                return wire.FAILED, failure, ()
            if note is not None:  # nothing interrupts this: what was told and what is noted are the same
                note()
            return status, content, segments
        except self.interrupts:  # it came in a line of the handlers above
            self._give_up(number)
            return wire.INTERRUPTED, None, ()
        finally:
            self.running = 0
            self._leave(held, plan)
            cell.worker = outer

    def times(self) -> tuple[int, int, int, int, int]:
        """Return what the reply says of the last order."""
        return self.received_ns, self.began_ns, self.ended_ns, time.monotonic_ns(), self.waited_ns

    def _leave(self, held: Any, plan: int) -> None:
        """Let no other rank wait for this one, and see what the function has kept of its inputs."""
        if isinstance(held, (RankPlan, RankDestination)):
            self.peers.leave_call(self.lane)
            self.waited_ns = self.lane.waited_ns
        self.own_up[_PHASE] = _IDLE
        if held is not None:
            held.leave(self)
            if held.is_once:
                self.held.pop(plan, None)

    def _say(self, plan: int) -> None:
        """Answer an order that is no plan."""
        if plan == wire.SYNC:
            self._clean("")
            for slot in self.slots.values():
                self.backend.forget_segment(slot)
            self.slots.clear()  # the program may have lost the reply that told of them
            self.told_slots.clear()

    def _failure(self, error: BaseException) -> Any:
        """Return an exception as it travels, and unlink it from the frames it went through: they hold arrays."""
        is_collateral = self.peers.is_collateral(error) or (
            self.process_group is not None and self.process_group.is_lost_peer(error)
        )
        error = self.backend.explain(error, repr(self.function_name))
        failure = pack_failure(error, self.rank, self.device, is_collateral=is_collateral)
        drop_frames(error)
        return failure

    # -- what calls leave ---------------------------------------------------------------------------------------------

    def _give_up(self, number: int, text: str = "") -> None:
        """A call has failed here."""
        self.running = 0
        self.variables.abandon()
        self.changes.take_back(number)
        self._clean(text)

    def _clean(self, text: str) -> None:
        self.peers.give_up_started(self.lane)
        if self.process_group is not None:
            self.process_group.abandon()
        self.recover(text)

    def recover(self, text: str) -> None:
        """See that nothing of a call that failed is left on the device."""

    def detach(self) -> None:
        """Before the user's code runs again, copy outputs of earlier calls that it could change and that are needed."""

    # -- news ---------------------------------------------------------------------------------------------------------

    def _learn(self, number: int, body: Any, fds: list[Descriptor]) -> None:
        """Take in what came with an order: first what is to be forgotten, then things, parcels, and plans.

        Raises
        ------
        RuntimeError
            If what came before was broken off, and the program did not know of that when it sent this.
        """
        before, self.broken_off = self.broken_off, number
        if before > (-1 if body is None else body[-1]):
            raise RuntimeError(
                f"cannot take in message {number}: got it after one that was broken off, expected that one again. Call "
                "again."
            )
        forgets, parcels, items, settings, search_path, _ = body
        self.num_messages += 1  # news are a message of their own to whoever looks for changes
        self.own_up[_PHASE] = _LOADING
        for each in forgets:
            self._forget(*each)
        if search_path is not None:
            wanted, told_levels = search_path
            sys.path[:] = merged(wanted, self.own_path) if self.own_path else wanted
            set_levels(told_levels)
        self.check_interrupt(number)
        try:
            if settings is not None:
                self.settings.take_in(settings)
            for kind, what, payload in items:
                if kind in _BEFORE_PARCELS:
                    self._make(kind, what, payload, fds)
            if parcels:
                self.failpoint("distribute.loading")
                with self.settings.importing():
                    for each in parcels:
                        self._load(each)
            for kind, what, payload in items:
                if kind not in _BEFORE_PARCELS:
                    self._make(kind, what, payload, fds)
            self.broken_off = 0
        finally:
            self.running = 0

    def _load(self, told: tuple[int, bytes, bool]) -> None:
        if told[0] not in self._parcels:
            self._received.load(*told, self._load_function)
            self._parcels.add(told[0])

    def _load_function(self, function_id: int, options: dict[str, Any]) -> None:
        modules = () if options.pop("changes") else options["modules"]
        self.functions[function_id] = LoadedFunction(**{**options, "modules": modules}, backend=self.backend)

    def _make(self, kind: str, number: int, payload: Any, fds: list[Descriptor]) -> None:
        """Make of a thing what this rank has of it."""
        if kind == "memory":
            self._map(number, payload, fds)
            return
        payload, num_fds = payload
        own = [fds.pop(0) for _ in range(num_fds)]
        if kind == "variable":
            self.variables.told(number, payload, self.held, own)
        elif kind == "resident":
            self.residents.told(number, payload)
        elif kind == "plan":
            self.held[number] = self.plan_type(self, payload)
        elif kind == "reduction":
            self.held[number] = self.reduction_type(self, payload)
        elif kind == "items":
            self.held[number] = RankItems(payload)
        elif kind == "destination":
            self.held[number] = RankDestination(self, payload)
        elif kind == "lane":
            self.peers.connect(self.lanes[payload[0]], self.held[payload[1]])
        else:
            ask = self.questions[kind]
            self.held[number] = RankQuestion(lambda rank: ask(rank, payload))

    def _map(self, number: int, described: tuple[int, bool, bool, bool, int, int], fds: list[Descriptor]) -> None:
        nbytes, is_writable, is_staging, is_arena, arena, offset = described
        if arena:
            if number not in self.held:
                part = self.held[number] = self.held[arena].part(number, offset, nbytes)
                self.backend.note_segment(part)
            return
        fd = fds.pop(0)
        if number in self.held:  # told twice, because a message was broken off
            return
        is_private = not (is_writable or self.backend.is_device)
        segment = Segment(fd, nbytes, is_writable=is_writable, segment_id=number, is_private=is_private)
        segment.is_staging, segment.is_arena = is_staging, is_arena
        if not is_staging:  # only staging memory may have to be mapped again
            segment.close_fd()
        self.held[number] = segment
        if not is_arena:
            self.backend.note_segment(segment)

    def _forget(self, kind: str, number: int, value: Any) -> None:
        if kind == "function":
            self.functions.pop(number, None)
            return
        if kind == "parcel":
            self._received.drop(number, value)
            self._parcels.discard(number)
            return
        held = self.held.pop(number, None)
        self.variables.forget(number)
        self.residents.pop(number, None)
        if isinstance(held, Segment):
            self.backend.forget_segment(held)
            held.close()

    def _own_memory(self, number: int, offset: int, nbytes: int) -> np.ndarray:
        """Return bytes of a segment in an array. Only this process sees what it writes there."""
        segment = self.held[number]
        if not segment.is_private:
            return segment.buffer[offset : offset + nbytes].copy()
        return own_bytes(segment.buffer[offset : offset + nbytes])

    def dumped(self, resident: int, wanted: str) -> bytes:
        """Return a resident object pickled: its ``"state"`` for ranks; what is ``"kept"``, or all, for the program."""
        found = self.residents[resident]
        if wanted == "state":
            return found.state()
        return dumps(found.value if wanted == "whole" else found.kept())

    def prepare(self, function: LoadedFunction) -> None:
        """Run ``on_restart``, which the replacement of a rank that died runs before its first call."""
        try:
            function.fn()
            if self.variables.assigned:
                raise TypeError(
                    "cannot assign a shared variable in on_restart: it runs on one rank, and all ranks must hold the "
                    "same. Assign it in a call."
                )
        finally:
            self.variables.abandon()

    # -- during a call ------------------------------------------------------------------------------------------------

    def begin_call(self, plan: RankPlan) -> None:
        """Prepare for the user's function."""
        lane = self.lane = self.lanes[plan.look.lane]
        lane.called = plan
        self.variables.begin(plan.function, plan.look.num_slices > 1 and not plan.look.is_rowless)
        self.own_up[_PHASE] = _FUNCTION

    def end_function(self) -> None:
        """Settle what the function has done besides its result."""
        self.end_if_copy()
        if self.peers.is_communicating:
            self.peers.complete(self.lane)
        if self.variables.given:
            self.variables.check_given()
        self.own_up[_PHASE] = _PUBLISHING
        self.failpoint("call.after_function")

    def check_interrupt(self, number: int) -> None:
        """From here on SIGINT may end the call; if it came before, end it now."""
        self.running = number
        self._num_deferred = 0
        self.is_held = self.is_due = self._is_shielded = False
        if number <= self._own_down[_INTERRUPT]:
            raise Interrupted

    def on_interrupt(self, frame: Any) -> bool:
        """Act on a SIGINT. Return False if it must come again: a module is being imported, or a finalizer runs."""
        # The word says which calls are meant: a signal that comes late must not end a later call.
        if not self.running or self.running > self._own_down[_INTERRUPT]:
            return True
        if self._is_shielded:
            self._num_deferred += 1
            return True
        if must_go_on(frame, Rank.answer.__code__):
            return False
        self.interrupt()
        return True

    def interrupt(self) -> None:
        """End the current call now, or at the end of its step if ``hold_back`` says so."""
        if self.is_held and not self.is_due:
            self.is_due = True
            return
        raise Interrupted

    def hold_back(self, is_held: bool) -> None:
        """Begin or end a step that this rank can finish by itself: an interrupt in it is raised only at its end.

        This is weaker than :meth:`uninterrupted`: the program sends a second interrupt to a rank that has not answered
        the first one, and that one is raised at once. So even code that never ends can be ended.
        """
        was_due = self.is_due
        self.is_held, self.is_due = is_held, False
        if was_due:
            raise Interrupted

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back an interrupt of the current call while the body runs."""
        was_shielded, self._is_shielded = self._is_shielded, True
        num_deferred = self._num_deferred
        try:
            yield
        finally:
            self._is_shielded = was_shielded
        if not was_shielded and self._num_deferred != num_deferred:
            self.interrupt()

    # -- who it is ----------------------------------------------------------------------------------------------------

    @property
    def rng(self) -> np.random.Generator:
        """The generator of the present item of a map; else this rank's own."""
        return self._own_rng if self.items is None else self.items.rng(self)

    @functools.cached_property
    def _own_rng(self) -> np.random.Generator:
        """This rank's own generator of random numbers."""
        seed, *key = self.seed
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(key)))

    @property
    def num_rows(self) -> int:
        """This rank's rows in the call."""
        return int(self.lane.down[self.rank, Down.ROWS])

    @property
    def function_name(self) -> str:
        if self.mapped is not None:
            return self.mapped.name
        called = self.lane.called
        return called.function.name if called is not None else ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ``synk.comm`` counts: those of the current call or, outside of one and in a map, all."""
        if self.mapped is None and self.own_up[_PHASE] == _FUNCTION:
            return self.lane.ranks
        return tuple(range(self.world_size))

    @property
    def total_rows(self) -> int:
        """The rows of all ranks in the call."""
        return sum(self.lane.rows().values())

    def disown(self) -> None:
        """In a child that the function has forked: it is no rank, and ``synk.comm`` refuses it."""
        self.is_copy = True
        self.peers.short_path = self.peers.current = None
        for lane in self.lanes:
            if lane.communicator is not None:
                lane.communicator.disown()

    def end_if_copy(self, error: BaseException | None = None) -> None:
        """End a child that the function has forked where the function has returned, or raised ``error``."""
        if self.is_copy:
            end_copy(error)

    def collectives(self) -> Collectives:
        """Return the collectives of the current call, for ``synk.comm``."""
        if self.is_copy:
            raise ReentrancyError(
                f"cannot communicate in a process that {self.function_name!r} has forked: its parent is the rank. Send "
                "its results to the parent, which communicates."
            )
        self.check_called()
        if self.variables.is_sliced:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: the call has num_slices above 1, so each rank runs the "
                "function several times, and not all of them equally often. Call it with num_slices=1."
            )
        called = self.lane.called
        if called is None or self.own_up[_PHASE] != _FUNCTION:
            # To join the lane's last call once more would be worse: no rank would be there, and nobody would leave it.
            raise ValueError(
                "cannot communicate outside of a call: got a collective or a message in on_restart, or in code that "
                "runs while an object is loaded or sent, expected one in a function that all ranks run together."
            )
        self.backend.enter_thread()
        return self.peers.collectives(self.lane, called.function)

    def check_called(self) -> None:
        """Raise in an item of a map, which runs on one rank: what follows is for calls that all ranks run together."""
        if self.mapped is not None:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: synk.map runs it for each item on one worker, while "
                "the others are at other items, expected a function that needs no other rank. Use synk.function for "
                "one that all ranks run together."
            )

    def close(self) -> None:
        """Release the device and all memory. A process that ends anyway need not call this."""
        if self.process_group is not None:
            self.process_group.close()
        self.peers.close()
        self.variables.close()
        self.backend.close()
        self.held.clear()
