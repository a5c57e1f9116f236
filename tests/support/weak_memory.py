"""Shared memory as weak as processors make it: programs of a few steps, run in every order that it allows.

Of a program, any step that is not done yet may be the next one, unless it has to wait for an earlier one: the function
``_must_wait`` is the memory model, and all of it. It is weaker than AArch64 in one point that costs nothing here: no
load waits for the load whose value leads to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

Memory = Mapping[str, int]
Origin = tuple[str, int]


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One access of a rank to shared memory, a fence, or a system call.

    Attributes
    ----------
    kind : str
        ``"store"``, ``"load"``, ``"await"`` (loads until a condition holds), ``"nap"`` (likewise, asleep between two
        looks until somebody writes to the rank's eventfd), ``"fence"``, ``"write"`` or ``"read"`` (``word`` is a pipe,
        an eventfd or a signal), ``"note"`` (in the source, and nothing here: the word is the rank's own).
    name : str
        As in the outline of the source.
    origin : tuple (str, int)
        The block that it belongs to, and its place there.
    """

    kind: str
    name: str
    word: str = ""
    value: int | Callable[[int], int] = 0  # to store; a function of the old one where that is the rank's own
    expected: int | None = None  # what a load must find
    register: str = ""  # where a load keeps its value; what a write depends on
    until: Callable[[Memory], bool] | None = None
    words: tuple[str, ...] = ()  # that ``until`` reads
    origin: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Block:
    """The steps of one function, in program order; a function that it calls is a block inside."""

    name: str
    items: tuple[Step | Block, ...]

    def steps(self) -> Iterator[Step]:
        for place, item in enumerate(self.items):
            if isinstance(item, Block):
                yield from item.steps()
            elif item.kind != "note":
                yield replace(item, origin=(self.name, place))

    def outline(self) -> list[str]:
        """Return the names of the steps, with calls in the place of inner blocks."""
        return [f"call {item.function}" if isinstance(item, Block) else item.name for item in self.items]

    @property
    def function(self) -> str:
        return self.name.split(".")[-1]

    def blocks(self) -> Iterator[Block]:
        for item in self.items:
            if isinstance(item, Block):
                yield item
                yield from item.blocks()


def block(name: str, *items: Step | Block) -> Block:
    return Block(name, items)


def _base(word: str) -> str:
    return word.split("[")[0]


def store(word: str, value: int | Callable[[int], int]) -> Step:
    return Step("store", f"store {_base(word)}", word, value)


def load(word: str, register: str) -> Step:
    return Step("load", f"load {_base(word)}", word, register=register)


def expect(word: str, value: int) -> Step:
    """Load data, which must be there."""
    return Step("load", f"load {_base(word)}", word, expected=value)


def await_(word: str, until: Callable[[int], bool]) -> Step:
    return Step("await", f"load {_base(word)}", until=lambda memory: until(memory[word]), words=(word,))


def note(name: str) -> Step:
    return Step("note", name)


def write(pipe: str, register: str = "", name: str = "") -> Step:
    """Write to a pipe or an eventfd; with ``register``, only if that is odd."""
    return Step("write", name or f"write {_base(pipe)}", pipe, register=register)


def read(pipe: str, name: str = "") -> Step:
    return Step("read", name or f"read {_base(pipe)}", pipe)


FENCE = Step("fence", "fence")


# -- the memory -------------------------------------------------------------------------------------------------------


def _must_wait(earlier: Step, later: Step) -> bool:
    """Whether ``later`` is never done before ``earlier``, which comes before it in the program."""
    if "fence" in (earlier.kind, later.kind):
        return True
    if {earlier.word, *earlier.words} & {later.word, *later.words} - {""}:
        return True  # accesses to one word
    if earlier.kind in ("await", "nap") and later.kind in ("store", "write"):
        return True  # no processor shows a store that it might have to take back, if a branch turns out the other way
    # What the kernel does is under a lock: all that came before is seen by whoever reads what was written.
    return later.kind == "write" or earlier.kind == "read"


Check = Callable[[Memory], str | None]
Change = Callable[[list[Step]], list[Step]]


@dataclass(frozen=True)
class Protocol:
    """What several processes do together.

    Attributes
    ----------
    processes : tuple of Block
        What each of them does.
    initial : dict
        Words that are not zero at first.
    check : callable
        What is wrong with the values in the registers at the end; None if nothing is.
    """

    processes: tuple[Block, ...]
    initial: Memory
    check: Check = lambda registers: None

    def programs(self) -> list[list[Step]]:
        return [list(process.steps()) for process in self.processes]

    def mutated(self, process: int, change: Change) -> Protocol:
        processes = list(self.processes)
        processes[process] = block("", *change(list(processes[process].steps())))
        return replace(self, processes=tuple(processes))

    def blocks(self) -> Iterator[Block]:
        """All functions that occur, as often as they do."""
        for process in self.processes:
            yield from process.blocks()


_Registers = tuple[tuple[str, int], ...]
_State = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], _Registers]
"""Memory; steps done, as bits, and whether asleep, of each process; registers."""


def explore(protocol: Protocol) -> str | None:
    """Return what can go wrong in some order of the steps, or None."""
    machine = _Machine(protocol)
    pending, seen = [machine.start], {machine.start}
    while pending:
        state = pending.pop()
        try:
            successors = machine.successors(state)
        except _Fault as fault:
            return str(fault)
        if not successors and (problem := machine.problem_at_end(state)):
            return problem
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                pending.append(successor)
    return None


class _Fault(Exception):
    """A load has found what it must not find."""


class _Machine:
    """The processes of a protocol and their memory."""

    def __init__(self, protocol: Protocol) -> None:
        self._programs = protocol.programs()
        self._check = protocol.check
        self._blockers = [
            [sum(1 << i for i in range(j) if _must_wait(program[i], program[j])) for j in range(len(program))]
            for program in self._programs
        ]
        steps = [step for program in self._programs for step in program]
        names = {word for step in steps for word in (step.word, *step.words)} | set(protocol.initial)
        self._words = {word: place for place, word in enumerate(sorted(names))}
        count = len(self._programs)
        memory = tuple(protocol.initial.get(word, 0) for word in self._words)
        self.start: _State = (memory, (0,) * count, (False,) * count, ())
        self._possible = functools.cache(self._find_possible)

    def _find_possible(self, process: int, done: int) -> list[tuple[Step, int]]:
        """Return the steps that may be next, each with what is done after it."""
        return [
            (step, done | 1 << j)
            for j, step in enumerate(self._programs[process])
            if not done >> j & 1 and not self._blockers[process][j] & ~done
        ]

    def successors(self, state: _State) -> list[_State]:
        memory, done, asleep, registers = state
        found: list[_State] = []
        for k in range(len(done)):
            for step, after in self._possible(k, done[k]):
                done_after = (*done[:k], after, *done[k + 1 :])
                if step.kind == "fence":  # disturbs nobody, so no other order has to be tried
                    return [(memory, done_after, asleep, registers)]
                if step.kind in ("await", "nap"):
                    found += self._look(step, k, state, done_after)
                elif step.kind != "read" or memory[self._words[step.word]]:
                    found.append(self._perform(step, k, state, done_after))
        return found

    def _perform(self, step: Step, k: int, state: _State, done: tuple[int, ...]) -> _State:
        memory, _, asleep, registers = state
        place = self._words[step.word]
        old = memory[place]
        new = old
        if step.kind == "store":
            new = step.value(old) if callable(step.value) else step.value
        elif step.kind == "read":
            new = 0
        elif step.kind == "write":
            new = 1 if not step.register or dict(registers)[step.register] & 1 else old
            registers = tuple(each for each in registers if each[0] != step.register)
        elif step.expected not in (None, old):
            raise _Fault(f"process {k} reads {old} in {step.word} instead of {step.expected}")
        elif step.register:
            registers = tuple(sorted((*registers, (step.register, old))))
        return (*memory[:place], new, *memory[place + 1 :]), done, asleep, registers

    def _look(self, step: Step, k: int, state: _State, done: tuple[int, ...]) -> list[_State]:
        """Look whether what a process waits for is there; one that naps looks again when it was woken."""
        memory, done_before, asleep, registers = state
        assert step.until is not None
        if step.kind == "nap" and asleep[k]:
            place = self._words[step.word]
            awake = (*asleep[:k], False, *asleep[k + 1 :])
            return (
                [((*memory[:place], 0, *memory[place + 1 :]), done_before, awake, registers)] if memory[place] else []
            )
        if step.until({word: memory[self._words[word]] for word in step.words}):
            return [(memory, done, asleep, registers)]
        return [(memory, done_before, (*asleep[:k], True, *asleep[k + 1 :]), registers)] if step.kind == "nap" else []

    def problem_at_end(self, state: _State) -> str | None:
        for k, program in enumerate(self._programs):
            if state[1][k] != (1 << len(program)) - 1:
                return f"process {k} waits for ever"
        return self._check(dict(state[3]))


# -- mutations --------------------------------------------------------------------------------------------------------


def fences(program: Sequence[Step]) -> set[Origin]:
    return {step.origin for step in program if step.kind == "fence"}


def without(fence: Origin) -> Change:
    """Drop a fence wherever its function is called."""
    return lambda program: [step for step in program if step.origin != fence]


def _is_shown(step: Step) -> bool:
    """Whether others can see the step: a store, or a system call that is always made."""
    return step.kind == "store" or (step.kind == "write" and not step.register)


def ordered_stores(program: Sequence[Step]) -> set[tuple[Origin, Origin]]:
    """Return the pairs of stores, or of a store and a system call, that follow each other with a fence between.

    A system call needs none: it shows all that came before it.
    """
    pairs = set()
    shown = [step for step in program if _is_shown(step) or step.kind == "fence"]
    for place, step in enumerate(shown):
        following = shown[place + 1 : place + 3]
        if step.kind != "store" or not following:
            continue
        has_fence = following[0].kind == "fence"
        other = following[-1] if has_fence else following[0]
        if (has_fence or other.kind == "write") and other.kind != "fence" and other.word != step.word:
            pairs.add((step.origin, other.origin))
    return pairs


def swapped(first: Origin, second: Origin) -> Change:
    """Swap two stores wherever they follow each other."""

    def change(program: list[Step]) -> list[Step]:
        places = [k for k, step in enumerate(program) if _is_shown(step)]
        for a, b in itertools.pairwise(places):
            if (program[a].origin, program[b].origin) == (first, second):
                program[a], program[b] = program[b], program[a]
        return program

    return change
