"""What a call would do, without doing it: rows, bytes and messages for each rank, and how each output comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from synk._master.calls.arguments import transfers_in
from synk._master.calls.binding import bind
from synk._master.calls.callee import Callee
from synk._master.calls.compiled import why_new
from synk._master.calls.plans import CachedPlan, CallOptions
from synk._master.session import Session
from synk._master.state.sums import Transfer
from synk._pure.ops import Reduction
from synk._pure.show import Text
from synk._pure.trees import output_names
from synk._wire.messages import LARGE_NBYTES, is_reduced_on_devices


@dataclass(frozen=True)
class RankPlan:
    """The part of a call that one rank would get.

    Attributes
    ----------
    rank, rows : int
    low, high : int
        Its rows, as positions in the selection of the call.
    in_nbytes : int
        How many bytes of arrays it reads.
    """

    rank: int
    rows: int
    low: int
    high: int
    in_nbytes: int


@dataclass(frozen=True)
class OutputPlan:
    """How one output would come back, as far as an earlier call has shown.

    Attributes
    ----------
    name, op : str
    nbytes : int
        Bytes of all ranks together.
    way : str
    """

    name: str
    op: str
    nbytes: int
    way: str


@dataclass(frozen=True)
class CallPlan:
    """What a call would do. It prints as tables. See :meth:`synk.Function.plan`.

    Attributes
    ----------
    function : str
    why_new : str
        Why it is not like the last call, so that each rank may need more than a doorbell of 8 bytes; else empty.
    transfers : tuple of Transfer
        What its arguments transfer.
    ranks : tuple of RankPlan
    outputs : tuple of OutputPlan
        Empty before the first call.
    """

    function: str
    why_new: str
    transfers: tuple[Transfer, ...]
    ranks: tuple[RankPlan, ...]
    outputs: tuple[OutputPlan, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether it is like the last call, so that each rank needs only a doorbell of 8 bytes."""
        return not self.why_new

    def _repr_html_(self) -> str:
        return Text(self)._repr_html_()

    def __repr__(self) -> str:
        how = (
            "8 bytes to each rank: it is like the last call"
            if self.is_compiled
            else f"it takes the slow path: {self.why_new}"
        )
        lines = [f"{self.function!r}: {how}", f"{'argument':<16}{'kind':<10}{'bytes':>14}{'bytes/row':>12}"]
        lines += [f"{t.argument:<16}{t.kind:<10}{t.nbytes:>14}{t.row_nbytes or '':>12}" for t in self.transfers]
        lines += [f"{'rank':<8}{'rows':>10}{'from':>12}{'to':>12}{'bytes read':>14}"]
        lines += [f"{r.rank:<8}{r.rows:>10}{r.low:>12}{r.high:>12}{r.in_nbytes:>14}" for r in self.ranks]
        if self.outputs:
            lines += [f"{'output':<16}{'op':<10}{'bytes':>14}  way"]
            lines += [f"{o.name:<16}{o.op:<10}{o.nbytes:>14}  {o.way}" for o in self.outputs]
        return "\n".join(lines)


def dry_run(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
) -> CallPlan:
    """Bind a call as :func:`synk._master.calls.call.launch` does, and say what would be sent.

    What the function captured must have been compared, and no call may be in flight.
    """
    reason = why_new(session, function, args, kwargs, options)  # asked before the workers are told what they lack
    function.load(session, deadline)
    call = bind(session, function, args, kwargs, options, deadline)
    transfers = transfers_in(call.arguments, call.objects)
    row_nbytes = sum(each.row_nbytes for each in transfers)
    whole_nbytes = sum(each.nbytes for each in transfers if not each.row_nbytes)
    ranks = []
    for rank, num_rows in zip(call.ranks, call.rows):
        low, high = call.bounds[rank]
        ranks.append(RankPlan(rank, num_rows, low, high, num_rows * row_nbytes + whole_nbytes))
    compiled = next((each for each in function.plans.compiled if each is not None), None)
    outputs = () if compiled is None else _outputs_of(compiled.cached)
    return CallPlan(function.name, reason, transfers, tuple(ranks), outputs)


def _outputs_of(cached: CachedPlan) -> tuple[OutputPlan, ...]:
    assembly = cached.assembly
    if assembly is None:
        return ()
    found = []
    of_ranks = [layout.leaves for layout in assembly.layouts]
    for name, op, *leaves in zip(output_names(assembly.skeleton), assembly.ops, *of_ranks):
        nbytes = sum(leaf.nbytes for leaf in leaves)
        if leaves[0].dtype is None:
            way = "pickled by each rank, loaded by the program"
        elif is_reduced_on_devices(leaves[0], op, assembly.has_group):
            way = "reduced on the devices by NCCL"
        elif leaves[0].nbytes >= LARGE_NBYTES:
            work = "each rank reduces its part" if isinstance(op, Reduction) else "each rank copies its own"
            way = f"{work} in shared memory"
        else:
            way = "written to shared memory, combined by the program"
        found.append(OutputPlan(name, str(op), nbytes, way))
    return tuple(found)
