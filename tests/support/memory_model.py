"""The protocols of synk in shared memory, step by step, for ``weak_memory.explore``.

A block stands for a function of the source and has its name; its steps have the names of the words that the function
reads and writes. ``test_memory_model.py`` compares both with the source, so neither can change without the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from support.weak_memory import (
    FENCE,
    Block,
    Memory,
    Protocol,
    Step,
    await_,
    block,
    expect,
    load,
    note,
    read,
    store,
    write,
)

# -- Rendezvous -------------------------------------------------------------------------------------------------------

CALL, EARLIER_CALL = 7, 6
PID = 70


def odd(number: int) -> int:
    return number | 1


def even(number: int) -> int:
    return number + (number & 1)


def begin(rank: int) -> Block:
    words = store(f"ticks[{rank}]", 0), store(f"pids[{rank}]", PID), note("store readers")
    return block("Rendezvous.begin", *words, FENCE, store(f"sequences[{rank}]", CALL))


def end(rank: int, peer: int) -> Block:
    return block("Rendezvous.end", store(f"left[{rank}]", CALL), wake_all(rank, peer, "end"))


def has_begun(peer: int) -> Block:
    return block("Rendezvous.has_begun", await_(f"sequences[{peer}]", lambda number: number == CALL), FENCE)


def has_left(rank: int, peer: int) -> Block:
    return block("Rendezvous.has_left", load(f"left[{peer}]", f"{rank}:left"), FENCE)


def has_arrived(peer: int, tick: int) -> Block:
    return block("Rendezvous._has_arrived", has_begun(peer), await_(f"ticks[{peer}]", lambda number: number >= tick))


def _wake_up(rank: int, peer: int, register: str) -> tuple[Step, ...]:
    register = f"{rank}:{register}:sleeps"
    return FENCE, load(f"sleeps[{peer}]", register), write(f"eventfds[{peer}]", register)


def wake_all(rank: int, peer: int, register: str) -> Block:
    return block("Rendezvous.wake_all", *_wake_up(rank, peer, register))


def wake(rank: int, peer: int, register: str) -> Block:
    return block("Rendezvous.wake", *_wake_up(rank, peer, register))


def rouse(rank: int) -> Block:
    return block("Rendezvous.rouse", note("load sleeps"), store(f"sleeps[{rank}]", even), FENCE)


def wait(rank: int, looks: Sequence[Step | Block], is_dozing: bool, acts: Sequence[Step | Block] = ()) -> Block:
    """``looks`` is what ``is_ready`` reads until it is satisfied, ``acts`` what it does then."""
    is_ready = block("is_ready", *(() if is_dozing else (*looks, *acts)))
    return block("Rendezvous.wait", is_ready, doze(rank, looks if is_dozing else (), acts), rouse(rank))


def doze(rank: int, looks: Sequence[Step | Block], acts: Sequence[Step | Block] = ()) -> Block:
    conditions = [step for step in Block("", tuple(looks)).steps() if step.until is not None]

    def until(memory: Memory) -> bool:
        return memory["abort"] == 1 or all(step.until(memory) for step in conditions if step.until is not None)

    words = tuple(word for step in conditions for word in step.words)
    nap = Step("nap", "read eventfds", f"eventfds[{rank}]", until=until, words=("abort", *words))
    if not looks:  # it was satisfied before it had to sleep
        return block("Rendezvous._doze")
    return block(
        "Rendezvous._doze",
        store(f"places[{rank}]", lambda number: number + 1),  # which of the naps it is
        FENCE,
        store(f"sleeps[{rank}]", odd),
        FENCE,
        block("is_ready", nap, *acts),  # with all that follows, until it is satisfied
        note("load sleeps"),
        note("call check_abort"),
        block("Rendezvous._nap", note("poll"), note("read eventfds")),
        note("call _check_deadlock"),
    )


def post(rank: int, place: int, value: int) -> Block:
    return block("Rendezvous.post", note("store requests"), post_packed(rank, place, value))


def post_packed(rank: int, place: int, value: int) -> Block:
    return block("Rendezvous.post_packed", store(f"requests[{rank}][{place}]", value), note("store places"))


def arrive(rank: int, peer: int, tick: int) -> Block:
    return block("Rendezvous.arrive", FENCE, store(f"ticks[{rank}]", tick), wake_all(rank, peer, str(tick)))


def has_met(rank: int, *looks: Step | Block) -> Block:
    return block("Rendezvous.has_met", *(looks or (note("call _have_all_arrived"),)), rouse(rank))


def have_all_arrived(peer: int, tick: int) -> Block:
    """All are known to have begun from their first meeting on, and no more than their ticks is looked at."""
    if tick == 1:
        looks: tuple[Step | Block, ...] = note("load ticks"), has_arrived(peer, tick)
    else:
        looks = await_(f"ticks[{peer}]", lambda number: number >= tick), note("call _has_arrived")
    rest = note("call has_left"), note("call _has_arrived"), note("call fail")
    return block("Rendezvous._have_all_arrived", *looks, *rest)


def wait_for_all(rank: int, peer: int, tick: int, is_dozing: bool) -> Block:
    """Go on when the other rank has arrived."""
    looks = have_all_arrived(peer, tick)
    if is_dozing:
        return block("ShmCollectives.meet", note("call has_met"), wait(rank, [looks], True, [has_met(rank)]))
    return block("ShmCollectives.meet", has_met(rank, looks), note("call wait"))


def compare(peer: int, tick: int) -> Block:
    return block("Rendezvous.compare", expect(f"requests[{peer}][{tick & 1}]", tick))


def weights(peer: int, tick: int) -> Block:
    return block("Rendezvous.weights", expect(f"requests[{peer}][{tick & 1}]", tick))


def meet(rank: int, peer: int, tick: int, is_dozing: bool) -> Block:
    """Arrive, and go on when the other rank has."""
    waited = block("yield", wait_for_all(rank, peer, tick, is_dozing))
    compared = compare(peer, tick), weights(peer, tick)
    return block("ShmCollectives.meet_steps", arrive(rank, peer, tick), waited, *compared)


def show(rank: int, tick: int) -> Block:
    return block("Meeting.show", store(f"halves[{rank}][{tick & 1}]", tick), note("store halves"))


def finish(peer: int, tick: int) -> Block:
    return block("Meeting.finish", expect(f"halves[{peer}][{tick & 1}]", tick))


def reduce(rank: int, peer: int, tick: int, is_dozing: bool) -> tuple[Block]:
    """Take the steps of a collective that meets once."""
    steps = block(
        "ShmCollectives._meet_once",
        note("call yield"),  # when the arguments are checked
        show(rank, tick),
        post_packed(rank, tick & 1, tick),
        arrive(rank, peer, tick),
        block("yield", wait_for_all(rank, peer, tick, is_dozing)),
        compare(peer, tick),
        weights(peer, tick),
        finish(peer, tick),
    )
    return (steps,)


def copy_from_memory(rank: int, peer: int, tick: int, is_dozing: bool) -> tuple[Block, ...]:
    """Take the steps of a collective that reads arrays where they lie: of two ticks, each with its half."""
    place, following = tick & 1, (tick + 1) & 1
    confirmed = block("yield", wait_for_all(rank, peer, tick + 1, is_dozing))
    reading = block(
        "ShmCollectives._read",
        expect(f"halves[{peer}][{place}]", tick),
        expect(f"pids[{peer}]", PID),
        expect(f"arrays[{peer}]", tick),
        note("load halves"),  # of what is short
    )
    steps = block(
        "ShmCollectives.read_steps",
        *(note("call _read_pieces"), reading),
        store(f"halves[{rank}][{following}]", tick + 1),  # whether it could read
        block(
            "ShmCollectives.meet_steps",
            *(arrive(rank, peer, tick + 1), confirmed, note("call compare"), note("call weights")),
        ),
        expect(f"halves[{peer}][{following}]", tick + 1),
        *(note("call show"), note("call meet_steps"), note("call _read_pieces")),  # if one could not
    )
    return (
        block("function", store(f"arrays[{rank}]", tick)),  # it has its array to itself between two collectives
        post(rank, place, tick),
        block("ShmCollectives.show", store(f"halves[{rank}][{place}]", tick)),
        meet(rank, peer, tick, is_dozing),
        steps,
    )


def reduce_at_once(rank: int, peer: int, tick: int, is_dozing: bool) -> tuple[Block]:
    """The same without steps."""
    steps = block(
        "ShmCommunicator.at_once",
        show(rank, tick),
        post_packed(rank, tick & 1, tick),
        arrive(rank, peer, tick),
        wait_for_all(rank, peer, tick, is_dozing),
        compare(peer, tick),
        note("load halves"),  # the heads of rows
        weights(peer, tick),
        finish(peer, tick),
    )
    return (steps,)


def _left_over(**words: int) -> dict[str, int]:
    """What the call before has left in the words of both ranks."""
    return {
        **{f"{name}[{rank}]": value for name, value in words.items() for rank in range(2)},
        **{f"sequences[{rank}]": EARLIER_CALL for rank in range(2)},
        **{f"left[{rank}]": EARLIER_CALL for rank in range(2)},
        "abort": 0,
    }


def _program(*items: Step | Block) -> Block:
    return block("", *items)


def collectives(num_ticks: int, *is_dozing: bool, is_short: tuple[bool, bool] = (False, False)) -> Protocol:
    """Collectives; from the third on a half is written again, by a rank that another may be behind."""

    def program(rank: int) -> Block:
        take = reduce_at_once if is_short[rank] else reduce
        rounds = [part for tick in range(1, num_ticks + 1) for part in take(rank, 1 - rank, tick, is_dozing[rank])]
        return _program(begin(rank), *rounds)  # no end: whoever comes late must not be saved by the wake-up there

    return Protocol((program(0), program(1)), _left_over(ticks=5))


def copies_from_memory(*is_dozing: bool) -> Protocol:
    """Two collectives that read arrays where they lie; between them each rank writes its own anew."""

    def program(rank: int) -> Block:
        rounds = [part for tick in (1, 3) for part in copy_from_memory(rank, 1 - rank, tick, is_dozing[rank])]
        return _program(begin(rank), *rounds)

    return Protocol((program(0), program(1)), _left_over(ticks=5, pids=PID - 1))


def leaving() -> Protocol:
    """Rank 0 arrives, then leaves; rank 1 looks once whether it has left without arriving."""
    look = block(
        "Rendezvous._have_all_arrived",
        note("load ticks"),
        block("Rendezvous._has_arrived", note("call has_begun"), load("ticks[0]", "1:before")),
        has_left(1, 0),
        block("Rendezvous._has_arrived", note("call has_begun"), load("ticks[0]", "1:after")),
        note("call fail"),
    )

    def check(registers: Memory) -> str | None:
        is_missed = registers["1:left"] == CALL and registers["1:after"] < 1
        return "a rank that arrived is said to have left" if is_missed else None

    programs = _program(begin(0), arrive(0, 1, 1), end(0, 1)), _program(has_begun(0), look)
    return Protocol(programs, _left_over(ticks=0), check)


def aborting() -> Protocol:
    """The master aborts a wait for a rank that will never come."""
    rank = _program(begin(0), arrive(0, 1, 1), wait(0, [has_arrived(1, 1)], True))
    return Protocol((rank, _program(set_abort(0))), _left_over(ticks=0))


def set_abort(rank: int) -> Block:
    return block("set_abort", store("abort", 1), write(f"eventfds[{rank}]"))


# -- Mailbox ----------------------------------------------------------------------------------------------------------

SENDER, RECEIVER = 0, 1
_WRITTEN, _READ, _RING = "written[0][1]", "read[1][0]", "rings[0][1]"


def clear(rank: int) -> Block:
    own: tuple[Step, ...] = store(_WRITTEN, 0), note("store read"), note("store unsent")
    if rank == RECEIVER:
        own = note("store written"), store(_READ, 0), note("store unsent")
    return block("Mailbox.clear", note("call clear"), *own)  # first of dictionaries


def begin_with_messages(rank: int) -> Block:
    return block("ShmCommunicator.begin", clear(rank), note("call clear"), begin(rank))


def room(count: int) -> Block:
    """There is room for message ``count`` when the one before was read; the ring takes one."""
    peer = block("Rendezvous.room", note("load written"), await_(_READ, lambda number: number >= count - 1))
    if count == 1:  # an empty ring has room whether the receiver has begun or not
        return block("Mailbox._room", note("call has_begun"), note("load written"), note("call room"))
    return block("Mailbox._room", has_begun(RECEIVER), note("load written"), peer)


def write_message(count: int, is_dozing: bool) -> Block:
    """A message for which the ring has room, or will have."""

    def write(look: Step | Block) -> Block:
        return block(
            "Mailbox._write",
            look,
            note("store unsent"),
            rouse(SENDER),
            note("load written"),
            store(_RING, count),
            FENCE,
            store(_WRITTEN, count),
            wake(SENDER, RECEIVER, str(count)),
            note("load written"),
            note("store unsent"),
        )

    if not is_dozing:
        return write(room(count))
    return wait(SENDER, [room(count)], True, [write(note("call _room"))])


def take_back(count: int, is_dozing: bool) -> Block:
    """The line of an array that is lent was read, and the array: it belongs to the function again."""
    rest = (
        *(note("load written"), note("store rings"), FENCE, note("store written")),
        *(wake(SENDER, RECEIVER, f"back {count}"), note("load written"), note("store unsent")),
    )

    def write(look: Step | Block) -> Block:
        return block("Mailbox._write", look, note("store unsent"), rouse(SENDER), *rest)

    if not is_dozing:
        return write(room(count + 1))
    return wait(SENDER, [room(count + 1)], True, [write(note("call _room"))])


def send_now(count: int) -> Block:
    return block(
        "ShortPath.send_now",
        note("load written"),
        await_(_READ, lambda number: number >= count - 1),
        *[note("store rings")] * 3,  # in parts
        store(_RING, count),
        FENCE,
        store(_WRITTEN, count),
        wake(SENDER, RECEIVER, str(count)),
    )


def take_in(count: int, is_dozing: bool, offered: str = "") -> tuple[Block, list[Step | Block]]:
    """Return what a receiver of message ``count`` waits for, and what it does then.

    ``offered``: where the message lies that it offers, if it does; its number lies there.
    """
    look = await_(_WRITTEN, lambda number: number >= count)
    read_offered: Step | Block = note("call _read_offered")
    if offered:
        words = expect("pids[0]", PID), expect(offered, count)
        read_offered = block("Mailbox._read_offered", *words, note("call fail"))
    acts: list[Step | Block] = [
        note("load read"),
        rouse(RECEIVER),
        note("load read"),
        expect(_RING, count),
        read_offered,
        note("load rings"),
        FENCE,
        store(_READ, count),
        wake(RECEIVER, SENDER, str(count)),
    ]
    rest = note("call write_on"), note("call advance")
    if not is_dozing:
        return block("Mailbox.progress", has_begun(SENDER), block("Mailbox._take_in", look, *acts), *rest), []
    progress = block("Mailbox.progress", has_begun(SENDER), note("call _take_in"), *rest)
    return block("", progress, look), [block("Mailbox._take_in", note("load written"), *acts)]


def recv_message(count: int, is_dozing: bool, offered: str = "") -> Block:
    looks, acts = take_in(count, is_dozing, offered)
    is_there = block("Mailbox.is_there", note("call has_left"), _as_call(looks), note("call fail"))
    return block(
        "MessageBox.finish",
        *(note("call post"), wait(RECEIVER, [is_there], is_dozing, acts)),
    )


def _as_call(looks: Block) -> Block:
    """Return a block that the source calls as ``progress``, whatever the model has put around it."""
    return looks if looks.name else Block("Mailbox.progress", looks.items)


def recv_now(count: int) -> Block:
    return block(
        "ShortPath.recv_now",
        note("load read"),
        await_(_WRITTEN, lambda number: number >= count),
        FENCE,
        expect(_RING, count),
        note("load written"),
        note("load rings"),
        FENCE,
        store(_READ, count),
        wake(RECEIVER, SENDER, str(count)),
    )


def short_messages() -> Protocol:
    """Three messages through a ring that takes one, by ranks that stay awake."""
    sender = _program(begin_with_messages(SENDER), has_begun(RECEIVER), *(send_now(count) for count in (1, 2, 3)))
    receiver = _program(begin_with_messages(RECEIVER), has_begun(SENDER), *(recv_now(count) for count in (1, 2, 3)))
    return Protocol((sender, receiver), {**_left_over(ticks=0), _WRITTEN: 3, _READ: 3})


def messages(*is_dozing: bool) -> Protocol:
    """Three messages through a ring that takes one."""
    counts = (1, 2, 3)
    sender = _program(begin_with_messages(SENDER), *(write_message(count, is_dozing[SENDER]) for count in counts))
    receiver = _program(begin_with_messages(RECEIVER), *(recv_message(count, is_dozing[RECEIVER]) for count in counts))
    return Protocol((sender, receiver), {**_left_over(ticks=0), _WRITTEN: 3, _READ: 3})


def offered_messages(*is_dozing: bool) -> Protocol:
    """An array that is changed after its send, then two private copies in one place, by turns."""
    asleep, receives_asleep = is_dozing
    places = "arrays[lent]", "arrays[copy]", "arrays[copy]"

    def fill(count: int, contents: int) -> Block:
        return block("function", store(places[count - 1], contents))

    released = block("Mailbox._note_written", await_(_READ, lambda number: number >= 2))
    sender = _program(
        begin_with_messages(SENDER),
        *(fill(1, 1), write_message(1, asleep), take_back(1, asleep), fill(1, 9)),
        *(fill(2, 2), write_message(2, asleep), released, fill(3, 3), write_message(3, asleep)),
    )
    receives = (recv_message(count, receives_asleep, place) for count, place in enumerate(places, 1))
    receiver = _program(begin_with_messages(RECEIVER), *receives)
    return Protocol((sender, receiver), {**_left_over(ticks=0, pids=PID - 1), _WRITTEN: 3, _READ: 3})


def leaving_after_a_message() -> Protocol:
    """The sender leaves after a message; the receiver looks whether it has left without sending."""
    sender = _program(begin_with_messages(SENDER), write_message(1, False), end(SENDER, RECEIVER))
    receiver = _program(has_begun(SENDER), has_left(RECEIVER, SENDER), load(_WRITTEN, "1:written"))

    def check(registers: Memory) -> str | None:
        is_missed = registers["1:left"] == CALL and registers["1:written"] < 1
        return "a rank that sent is said to have left" if is_missed else None

    return Protocol((sender, receiver), _left_over(ticks=0), check)


def check_deadlock() -> Block:
    """Rank 0 asks whether rank 1 sleeps over something that will not come."""
    stuck = block(
        "Rendezvous._is_stuck",
        load("places[1]", "0:place"),
        note("call has_begun"),
        note("load ticks"),
        note("load unsent"),
        note("call room"),
        note("load written"),
        load(_READ, "0:read"),
    )
    return block(
        "Rendezvous._check_deadlock",
        load("sleeps[1]", "0:first"),
        FENCE,
        note("call has_left"),
        note("call has_begun"),
        stuck,
        FENCE,
        load("sleeps[1]", "0:second"),
        note("call _give_verdict"),
    )


def _is_well_founded(registers: Memory) -> str | None:
    """What rank 0 takes for asleep must sleep over what rank 0 has read, and have changed nothing since."""
    number = registers["0:first"]
    if number != registers["0:second"] or not number & 1:
        return None
    if registers["0:place"] != (number + 1) // 2:
        return "a request was read that is not the one over which the rank sleeps"
    return "a message is taken for missing that has just been read" if number == 1 and registers["0:read"] else None


def verdicts_on_messages() -> Protocol:
    """Rank 1 takes two messages in, and sleeps before each."""
    sender = _program(write_message(1, False), check_deadlock(), write_message(2, False))
    receiver = _program(*(recv_message(count, True) for count in (1, 2)))
    initial = {**_left_over(ticks=0), "sequences[0]": CALL, "sequences[1]": CALL}
    return Protocol((sender, receiver), initial, _is_well_founded)


def verdicts_on_a_collective() -> Protocol:
    """Rank 1 meets rank 0 twice, and sleeps each time."""
    waits = [part for tick in (1, 2) for part in (arrive(1, 0, tick), _waited(tick))]
    initial = {**_left_over(ticks=0), "sequences[0]": CALL, "sequences[1]": CALL}
    asking = _program(arrive(0, 1, 1), check_deadlock(), arrive(0, 1, 2))
    return Protocol((asking, _program(*waits)), initial, _is_well_founded)


def _waited(tick: int) -> Block:
    return block("yield", wait(1, [has_arrived(0, tick)], True, [has_met(1)]))


def verdict() -> Protocol:
    """Rank 0 has found that nobody can go on, and leaves; rank 1 is told why."""
    gives = block(
        "Rendezvous._give_verdict",
        note("call check_abort"),
        store("verdicts[0]", CALL),
        FENCE,
        note("call has_left"),
        note("load verdicts"),
    )
    fails = block(
        "Rendezvous.fail", note("call check_abort"), load("verdicts[0]", "1:verdict"), note("call _give_verdict")
    )

    def check(registers: Memory) -> str | None:
        is_missed = registers["1:left"] == CALL and registers["1:verdict"] != CALL
        return "a rank is said to have left that has given a verdict" if is_missed else None

    return Protocol((_program(gives, end(0, 1)), _program(has_left(1, 0), fails)), _left_over(ticks=0), check)


# -- calls ------------------------------------------------------------------------------------------------------------


def tell(rank: int) -> Block:
    """An order: one write."""
    return block(
        "Workers.send", note("call write"), block("Link.write", write(f"pipe down[{rank}]", name="write pipe"))
    )


def hear_order(rank: int) -> Block:
    return block("Link.read", read(f"pipe down[{rank}]", name="read pipe"))


def reply(rank: int) -> Block:
    return block("Link.write", write(f"pipe up[{rank}]", name="write pipe"))


def replies() -> list[Block]:
    return [block("Link.read", read(f"pipe up[{k}]", name="read pipe")) for k in range(2)]


def begin_call(call: int) -> Block:
    """Arguments and the numbers of a call, then the orders."""
    show = block("Lane.show", note("store PARTICIPATES"), note("store ROWS"))
    staged = block("stage", store("staging", call))
    return block(
        "Call.begin",
        note("call stage"),
        staged,
        note("call show"),
        show,
        store("CALL", call),
        note("call send"),
        tell(0),
        tell(1),
    )


def body(rank: int, call: int) -> Block:
    """The user's function, with a variable that the call before has assigned."""
    front = block("Replica._front", expect("fronts", call - 1))
    return block("", expect("CALL", call), expect("staging", call), front, store(f"spare[{rank}]", call))


def run(rank: int, call: int) -> Block:
    """Outputs go into the slot."""
    check = block("Rank.check_interrupt", note("load INTERRUPT"))
    publish = block("publish", store(f"slots[{rank}]", call))
    steps = note("call begin"), note("call check_interrupt"), check
    return block("RankPlan.answer", *steps, note("call publish"), publish)


def calls() -> Protocol:
    """Two calls with large outputs, which the ranks reduce; each call assigns a variable."""

    def rank(k: int) -> Block:
        steps: list[Step | Block] = []
        for call in (1, 2):
            reduction = block("reduction", expect(f"slots[{1 - k}]", call), store(f"results[{k}]", call))
            steps += [hear_order(k), body(k, call), run(k, call), reply(k), hear_order(k), reduction, reply(k)]
        return _program(*steps)

    def call(number: int) -> list[Step | Block]:
        ask = block("Engine.ask", note("call send"), tell(0), tell(1), note("call wait"))
        values = [expect(f"{what}[{k}]", number) for what in ("results", "spare") for k in range(2)]
        turn = block("Variable.turn", store("fronts", number))
        commit = block("Workers.finish_commit", note("call turn"), turn)
        return [begin_call(number), *replies(), ask, *replies(), *values, commit]

    return Protocol((rank(0), rank(1), _program(*call(1), *call(2))), {"fronts": 0})


def interrupt() -> Protocol:
    """The program interrupts a call; the signal comes before the rank takes the call, which looks for itself."""
    program = block(
        "Workers._quiet",
        store("INTERRUPT", 1),
        note("call interrupt"),
        block("WorkerProcess.interrupt", write("SIGINT", name="call signal")),
        note("call write"),
        note("call wait"),
        note("call interrupt"),  # once more, to a rank that has not answered
        note("call fail"),  # after a second Ctrl-C
    )
    rank = [read("SIGINT"), block("Rank.check_interrupt", expect("INTERRUPT", 1))]
    return Protocol((_program(program), _program(*rank)), {})


def protocols() -> dict[str, Protocol]:
    """Return all protocols by name, those in which ranks wait with each rank awake and with each asleep."""
    found = {
        "interrupt": interrupt(),
        "aborting": aborting(),
        "leaving": leaving(),
        "verdict": verdict(),
        "short messages": short_messages(),
        "leaving after a message": leaving_after_a_message(),
        "calls": calls(),
        "verdicts on a collective": verdicts_on_a_collective(),
        "verdicts on messages": verdicts_on_messages(),
    }
    for is_dozing in itertools.product((False, True), repeat=2):
        how = " and ".join("asleep" if each else "awake" for each in is_dozing)
        found[f"a collective, {how}"] = collectives(1, *is_dozing)
        found[f"messages, {how}"] = messages(*is_dozing)
        found[f"offered messages, {how}"] = offered_messages(*is_dozing)
        found[f"copies from memory, {how}"] = copies_from_memory(*is_dozing)
    for is_short in ((True, True), (True, False)):
        how = "short" if all(is_short) else "short and by steps"
        found[f"collectives, {how}, awake"] = collectives(3, False, False, is_short=is_short)
        found[f"collectives, {how}, asleep"] = collectives(2, True, True, is_short=is_short)
    found["collectives, awake"] = collectives(3, False, False)
    found["collectives, asleep"] = collectives(2, True, True)
    return found
