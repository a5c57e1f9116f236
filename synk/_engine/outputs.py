"""From the replies of the ranks to the result: agreement, ops, where outputs lie, and who brings the large ones.

In one file because it is one class: the agreed layout decides where each output lies and how it is combined.
"""

from __future__ import annotations

import contextvars
import math
import pickle
from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

from synk._engine.things import Thing, Told
from synk._pure.agreement import MISSING, Agreement, agreed
from synk._pure.dtypes import describe_dtype
from synk._pure.exact import as_recarray
from synk._pure.ops import EACH, REDUCTIONS, EqualReduction, Op, Reduction
from synk._pure.output_ops import each_op, match_ops, wanted_leaves
from synk._pure.partials import SliceValues, concatenate, join
from synk._pure.ranges import LINE_NBYTES, block_bounds, chunk_bounds, round_up
from synk._pure.table_outputs import combined
from synk._pure.tables import is_table
from synk._pure.tensors import is_tensor, tensor_of
from synk._pure.trees import flatten, output_names, unflatten
from synk._pure.words import text_of
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Layout, Leaf, Share
from synk.errors import CollectiveMismatch, SerializationError, add_note

_MAX_SHARES = 8

_ABSENT = Leaf((), None)
"""Stands for a leaf that a rank does not have, because it returned None there."""


class Outputs:
    """How the outputs of one call become its result. It serves the next calls as long as they look like this.

    It has many attributes, because all that can be known from the layouts is worked out once, here: which outputs lie
    where, which are large, and how the small ones are combined.

    Parameters
    ----------
    name : str
        Name of the function, for errors.
    outputs : Op or nesting of them
    subset : tuple or None
        Positions or keys of the wanted outputs.
    voters : list of int
        The ranks that ran, ascending.
    layouts : list of Layout
        One for each voter.
    lane : Lane
        In whose slots the outputs lie.
    world_size : int

    Attributes
    ----------
    result_nbytes : int
        The room that large outputs take.
    assigned : list of Assigned
        What each voter has assigned to variables.
    nbytes : int
        Of all voters together.
    can_be_placed : bool
        Whether there are large outputs, and each is copied whole to its place in the result.
    rows : list of int
        How many rows each voter had.
    """

    def __init__(
        self,
        name: str,
        outputs: Any,
        subset: tuple[Any, ...] | None,
        voters: list[int],
        layouts: list[Layout],
        lane: Any,
        world_size: int,
    ) -> None:
        skeletons = [loaded(layout.skeleton, name, rank) for rank, layout in zip(voters, layouts)]
        self.name, self.voters, self._world_size, self._subset = name, voters, world_size, subset
        self.skeleton, self._positions, self._apart = self._agreed(skeletons, outputs)
        positions, self.structure = flatten(self.skeleton)
        self._leaves = [_in_place(each.leaves, own) for each, own in zip(layouts, self._positions)]
        self._items = list(zip(*self._leaves))  # by leaf, what each voter has
        self.ops: list[Op] = match_ops(outputs, self.skeleton, len(positions), repr(name))
        wanted = wanted_leaves(self.skeleton, subset, name)
        self._wanted = range(len(positions)) if wanted is None else sorted(wanted)
        # The ranks publish sums for an average over slices. Their sum is divided once, at the end.
        first = self._leaves[0]
        self._rank_ops: list[Op] = [
            REDUCTIONS["sum"] if op.is_weighted and leaf.partial_of is not None else op
            for op, leaf in zip(self.ops, first)
        ]
        self._is_as_returned = not any(leaf.is_tensor or leaf.partial_of is not None for leaf in first)
        self._reduced_leaves = [leaf for leaf in self._wanted if isinstance(self.ops[leaf], Reduction)]
        self._other_leaves = [leaf for leaf in self._wanted if not isinstance(self.ops[leaf], Reduction)]
        self.has_weights = any(self.ops[k].is_weighted and not self.ops[k].concatenates for k in self._wanted)
        self.result_nbytes = 0
        self._places: dict[tuple[int, int], int] = {}  # (leaf, voter or -1 for all) -> offset in the result
        self._is_tuple = self.skeleton == tuple(range(len(positions))) and type(self.skeleton) is tuple
        # Overflow and NaN are the caller's business, as in a NumPy reduction. Entering np.errstate at each call takes
        # longer than the reduction.
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")
        self._lane = lane.index
        self.slots = [lane.slots.get(rank) for rank in voters]
        self._sent = layouts
        self.assigned = [layout.assigned for layout in layouts]
        self.nbytes = sum(leaf.nbytes for layout in layouts for leaf in layout.leaves)
        self._shares: dict[int, list[Share]] = {rank: [] for rank in voters}
        self._told: dict[Any, dict[int, Thing]] = {}
        self.rows: Sequence[int] = ()
        self._whole: dict[int, list[tuple[int, int]]] = {rank: [] for rank in voters}
        self._destinations: dict[int, Destination] = {}
        self._lay_out([self._own_views(layout, slot) for layout, slot in zip(layouts, self.slots)])
        is_copied = all(not share.op for shares in self._shares.values() for share in shares)
        self.can_be_placed = bool(self.result_nbytes) and is_copied

    @staticmethod
    def _own_views(layout: Layout, slot: Segment | None) -> list[np.ndarray | None]:
        """Return a voter's arrays in its slot, and the places of pickles there. Large ones are brought by the ranks."""
        views: list[np.ndarray | None] = []
        for leaf, at in zip(layout.leaves, layout.places):
            if leaf.nbytes >= LARGE_NBYTES or (leaf.dtype is None and not leaf.room):
                views.append(None)
            else:
                views.append(np.empty(leaf.shape, leaf.dtype) if slot is None else leaf.view(slot, at))
        return views

    def _lay_out(self, views: Sequence[Sequence[np.ndarray | None]]) -> None:
        """Check the outputs, and give the large ones their places.

        Parameters
        ----------
        views : sequence of sequences of ndarray or None
            Each voter's small arrays, by its own leaves; None for large ones, which get to their places otherwise.
        """
        self._views: list[list[np.ndarray | None]] = [
            [each[position] if position != MISSING else None for position in own]
            for each, own in zip(views, self._positions)
        ]
        # Outputs that are not arrays, each with the place of its pickle, or None if that comes in the reply. Never an
        # array in place of a pickle: loading it could run any code.
        self._objects = [
            (voter, leaf, self._views[voter][leaf] if own[leaf].room else None)
            for voter, own in enumerate(self._leaves)
            for leaf in self._wanted
            if own[leaf].dtype is None and own[leaf] is not _ABSENT
        ]
        self._small_parts = [[view for view in column if view is not None] for column in zip(*self._views)]  # by leaf
        for leaf in self._wanted:
            self._check_leaf(leaf)
            self._place(leaf)
        self._small = self._reduced_slots()

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _agreed(self, skeletons: Sequence[Any], outputs: Any) -> Agreement:
        """Return the structure that all ranks agree on."""
        leaves, structure = flatten(skeletons[0])
        is_alike = all(flatten(skeleton) == (leaves, structure) for skeleton in skeletons[1:])
        if is_alike and not any(op is EACH for op in each_op(outputs)):
            return Agreement(skeletons[0], [leaves] * len(skeletons), {})
        found = agreed(skeletons, outputs, self.voters, self._world_size)
        if found is None:
            texts = [_describe(each) for each in skeletons]
            got = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self.voters, texts))
            if len(set(texts)) == 1:
                raise CollectiveMismatch(
                    f"cannot combine the outputs of {self.name!r}: got {got}, which are different classes of one name, "
                    "expected one class on all ranks. Define it outside of the function."
                )
            raise CollectiveMismatch(
                f"cannot combine the outputs of {self.name!r}: got {got}, expected one structure on all ranks. Give "
                "op None to what differs, which returns what each rank has returned. A list with an object for each "
                'row is joined with those of the other ranks under outputs="gather"; of numbers np.array(list) is an '
                "array, under any op. Counts by key are added as collections.Counter under outputs=operator.add."
            )
        return found

    def _check_leaf(self, leaf: int) -> None:
        op = self.ops[leaf]
        if not op.is_of_arrays:
            return
        kinds: list[tuple[Any, tuple[int, ...]]] = []
        for item in self._items[leaf]:
            if item.dtype is None:  # a list, a table or an int: their contents are compared when they are combined
                kinds.append((None, ()))
                continue
            shape = item.shape[1:] if op.concatenates else item.shape
            kinds.append((item.value_dtype, shape))
        if len(set(kinds)) > 1 and not (isinstance(op, Reduction) and _are_integers(self._items[leaf])):
            got = "; ".join(
                f"rank {rank}: {_name_of(own[leaf], op)} {own[leaf].shape}"
                for rank, own in zip(self.voters, self._leaves)
            )
            is_text = all(dtype is not None and dtype.kind in "US" for dtype, _ in kinds)
            hint = "Give texts one width, as in astype('U20')." if is_text else "Use op None for values that differ."
            if not op.concatenates and len({(dtype, shape[1:]) for dtype, shape in kinds if shape}) == 1:
                hint = 'Use outputs="gather" if it holds one value for each row.'
            raise CollectiveMismatch(
                f"cannot {'gather' if op.concatenates else op} {self._named(leaf)}: got {got}, expected the same dtype "
                f"and {'trailing ' if op.concatenates else ''}shape on all ranks. {hint}"
            )

    # -- large outputs ------------------------------------------------------------------------------------------------

    def _place(self, leaf: int) -> None:
        """Give a large output its place in the result, and the ranks their shares of it."""
        op, items = self._rank_ops[leaf], self._items[leaf]
        if all(item.nbytes < LARGE_NBYTES for item in items):
            return
        if isinstance(op, Reduction) and len(items) > 1:
            dtype, count = items[0].dtype, items[0].nbytes // items[0].dtype.itemsize
            offset = self._reserve(leaf, -1, items[0].nbytes)
            is_kept = self._sent[0].places[self._positions[0][leaf]] < 0  # NCCL then reduces it, on all ranks at once
            num_voters = len(self.voters)
            bounds = block_bounds(count, num_voters) if is_kept else chunk_bounds(count, dtype.itemsize, num_voters)
            for voter, (start, stop) in enumerate(bounds):
                if stop > start or is_kept:
                    at = start * dtype.itemsize
                    peers = [voter] if is_kept else range(num_voters)
                    sources = [self._source(peer, leaf, at) for peer in peers]
                    self._share(voter, Share(op.name, dtype, stop - start, sources, offset + at, []))
        elif isinstance(op, Reduction) or op.concatenates:
            offset = self._reserve(leaf, -1, sum(item.nbytes for item in items))
            for voter, item in enumerate(items):
                if item.nbytes >= LARGE_NBYTES:
                    self._copy(voter, leaf, item.nbytes, offset)
                offset += item.nbytes
        else:
            for voter, item in enumerate(items):
                if item.nbytes >= LARGE_NBYTES and (voter == 0 or not op.is_of_rank_0):
                    offset = self._reserve(leaf, voter, item.nbytes)
                    self._copy(voter, leaf, item.nbytes, offset)

    def _reserve(self, leaf: int, voter: int, nbytes: int) -> int:
        offset = self.result_nbytes
        self._places[leaf, voter] = offset
        self.result_nbytes += round_up(nbytes, LINE_NBYTES)
        return offset

    def _source(self, voter: int, leaf: int, at: int = 0) -> tuple[int, int]:
        slot, position = self.slots[voter], self._positions[voter][leaf]
        place = self._sent[voter].places[position]
        if place < 0:
            return -1 - self._lane, position
        assert slot is not None
        return slot.id, place + at

    def _copy(self, voter: int, leaf: int, nbytes: int, at: int) -> None:
        self._share(voter, Share("", np.dtype(np.uint8), nbytes, [self._source(voter, leaf)], at, []))
        self._whole[self.voters[voter]].append((self._positions[voter][leaf], at))

    def _share(self, voter: int, share: Share) -> None:
        self._shares[self.voters[voter]].append(share)

    def reductions(self, engine: Any, result: Segment, rows: Sequence[int]) -> dict[int, Thing]:
        """Return what each rank that has a share is told, for a result in this memory."""
        key = result.id, tuple(rows)
        if key not in self._told:
            while len(self._told) >= _MAX_SHARES:
                self._told.pop(next(iter(self._told)))
            needs = [slot for slot in self.slots if slot is not None] + [result]
            self._told[key] = {
                rank: Told(engine, "reduction", (result.id, [each._replace(rows=list(rows)) for each in shares]), needs)
                for rank, shares in self._shares.items()
                if shares
            }
        return self._told[key]

    def destination(self, engine: Any, plan: int, result: Segment) -> Destination:
        """Return what tells ranks to write large outputs into the result in this memory."""
        if result.id not in self._destinations:
            while len(self._destinations) >= _MAX_SHARES:
                self._destinations.pop(next(iter(self._destinations)))
            self._destinations[result.id] = Destination(engine, plan, result, self._whole)
        return self._destinations[result.id]

    # -- results ------------------------------------------------------------------------------------------------------

    def build(
        self,
        rows: Sequence[int],
        objects: Sequence[list[Any]],
        root: np.ndarray | None,
        order: np.ndarray | None,
    ) -> Any:
        """Return the result of one call.

        Parameters
        ----------
        rows : sequence of int
            The rows of each voter: the weights of averages.
        objects : sequence of lists
            Each voter's outputs that came in its reply, in leaf order; empty if there are none.
        root : ndarray of uint8 or None
            The leased buffer with the large outputs.
        order : ndarray of int64 or None
            Row k of gathered outputs goes to position ``order[k]``; None means that they are in order.
        """
        if self._small is not None and (not self.has_weights or len(set(rows)) <= 1):
            return self._context.run(self._build_small, self._small, rows)
        parts = self._parts(objects)
        values: list[Any] = [None] * len(self.ops)
        for leaf in self._other_leaves:  # these ops may be the user's, and compute under the program's own settings
            values[leaf] = self._value(leaf, parts.get(leaf, []), rows, root, order)
        if self._reduced_leaves:
            with np.errstate(all="ignore"):  # overflow and NaN are the caller's business, as in a NumPy reduction
                for leaf in self._reduced_leaves:
                    values[leaf] = self._as_returned(leaf, self._reduced(leaf, parts.get(leaf, []), rows, root), rows)
        return self._select(values)

    def _reduced_slots(self) -> list[EqualReduction] | None:
        """Return the reduction of each output if all are small, reduced, and of full precision, else None."""
        if self._subset is not None or self.result_nbytes:
            return None
        found = [
            op.equal_reduction(self._small_parts[leaf])
            if isinstance(op, Reduction) and all(item.dtype is not None for item in self._items[leaf])
            else None
            for leaf, op in enumerate(self._rank_ops)
        ]
        reductions = [reduction for reduction in found if reduction is not None]
        return reductions if len(reductions) == len(found) else None

    def _build_small(self, reductions: list[EqualReduction], rows: Sequence[int]) -> Any:
        """Return the result if the outputs only have to be combined and divided where they lie."""
        values = []
        # The slots belong to the lane's next call. Nothing that is returned may be a view of them.
        for combine, slots, divisor in reductions:
            value = fold(combine, slots) if len(slots) > 1 else _own(slots[0])
            values.append(value / divisor if divisor > 1 else value)
        if not self._is_as_returned:
            values = [self._as_returned(leaf, value, rows) for leaf, value in enumerate(values)]
        if self._is_tuple:
            return tuple(values)
        return values[0] if type(self.skeleton) is int else unflatten(self.structure, values)

    def _as_returned(self, leaf: int, value: Any, rows: Sequence[int]) -> Any:
        """Return a new value in the form in which the function returned it: finished, and a tensor if it was one."""
        item, op = self._leaves[0][leaf], self.ops[leaf]
        if item.partial_of is not None and isinstance(op, Reduction):
            value = op.finished(value, sum(rows), item.partial_of)
        return _tensor(value, item.is_tensor)

    def _parts(self, objects: Sequence[list[Any]]) -> dict[int, list[Any]]:
        """Return, for each leaf, the voters' outputs that are not arrays; None stands for an array."""
        parts: dict[int, list[Any]] = {}
        sent = [iter(own) for own in objects]
        for voter, leaf, view in self._objects:
            value = next(sent[voter]) if view is None else pickle.loads(view.data)
            parts.setdefault(leaf, [None] * len(self._leaves))[voter] = value
        return parts

    def _select(self, values: list[Any]) -> Any:
        if self._subset is None:
            return unflatten(self.structure, values)
        skeleton = self.skeleton

        def fill(node: Any) -> Any:
            positions, structure = flatten(node)
            return unflatten(structure, [values[position] for position in positions])

        if isinstance(skeleton, dict):
            return {key: fill(skeleton[key]) for key in self._subset}
        chosen = [fill(skeleton[key]) for key in self._subset]
        return chosen if type(skeleton) is list else tuple(chosen)

    def _array(self, leaf: int, voter: int, root: np.ndarray | None) -> np.ndarray:
        """Return a voter's array: a view of its slot, or of its place in the result buffer."""
        view = self._views[voter][leaf]
        if view is not None:
            return view
        item = self._leaves[voter][leaf]
        assert root is not None
        return view_in(root, self._places[leaf, voter], item.shape, item.dtype)

    def _value(self, leaf: int, parts: list[Any], rows: Sequence[int], root: np.ndarray | None, order: Any) -> Any:
        """Return the result of an output that is not reduced."""
        op = self.ops[leaf]
        if not op.concatenates:
            return self._combined(leaf, parts, rows, root)
        if not parts:
            value = self._gathered(leaf, root, order)
        else:
            self._check_order(leaf, sum(map(len, parts)), order)
            is_tabular = any(map(_is_tabular, parts))
            value = self._table(leaf, parts, rows, order) if is_tabular else join(parts, order)
        return _tensor(self._finished(leaf, value), self._leaves[0][leaf].is_tensor)

    def _table(self, leaf: int, parts: list[Any], rows: Sequence[int], order: np.ndarray | None) -> Any:
        return combined(self.ops[leaf], parts, rows, self._named(leaf), ranks=self.voters, order=order)

    def _combined(self, leaf: int, parts: list[Any], rows: Sequence[int], root: np.ndarray | None) -> Any:
        """Return the values of all ranks combined by an op that accepts any value, or a list of them under op None."""
        op, items = self.ops[leaf], self._items[leaf]
        values = [
            None
            if item is _ABSENT
            else parts[voter]
            if item.dtype is None
            else _tensor(_own(self._array(leaf, voter, root)), item.is_tensor)
            for voter, item in enumerate(items[:1] if op.is_of_rank_0 else items)
        ]
        if op is EACH and leaf in self._apart:
            return values[self._apart[leaf]]
        if op is EACH:
            everyone: list[Any] = [None] * self._world_size
            for rank, value in zip(self.voters, values):
                everyone[rank] = value
            return everyone
        counts = list(rows)
        if any(isinstance(value, SliceValues) for value in values):
            each = [
                value if isinstance(value, SliceValues) else SliceValues([value], [num])
                for value, num in zip(values, rows)
            ]
            values, counts = [v for part in each for v in part.values], [n for part in each for n in part.rows]
        return _tensor(self._finished(leaf, values, counts), is_tensor(values[0]))

    def _named(self, leaf: int) -> str:
        return f"{output_names(self.skeleton)[leaf]} of {self.name!r}"

    def _finished(self, leaf: int, value: Any, rows: list[int] | None = None) -> Any:
        """Return the result of an op. With ``rows``, ``value`` is the list of values that the op must first combine."""
        op = self.ops[leaf]
        try:
            return op.finish(value if rows is None else op.combine(value, rows))
        except Exception as error:
            add_note(error, f"Raised by op {op!r}, which combines {self._named(leaf)}.")
            raise

    def _reduced(self, leaf: int, parts: list[Any], rows: Sequence[int], root: np.ndarray | None) -> Any:
        if any(map(_is_tabular, parts)):
            return self._table(leaf, parts, rows, None)
        item, op = self._leaves[0][leaf], self._rank_ops[leaf]
        assert isinstance(op, Reduction)
        if parts:
            values = [self._array(leaf, voter, root)[()] if p is None else p for voter, p in enumerate(parts)]
            return op.combine_ints(values, self._named(leaf))
        if (leaf, -1) in self._places:
            assert root is not None
            return view_in(root, self._places[leaf, -1], item.shape, item.dtype)
        out = np.empty(item.shape, item.dtype)
        op.reduce_into(self._small_parts[leaf], rows, out)
        return out if item.shape else out[()]

    def _check_order(self, leaf: int, num_rows: int, order: np.ndarray | None) -> None:
        if order is not None and len(order) != num_rows:
            raise CollectiveMismatch(
                f"cannot gather {self._named(leaf)}: got {num_rows} rows for "
                f"{len(order)} selected ones, expected one output row per input row where batch picks rows of sharded "
                "variables."
            )

    def _gathered(self, leaf: int, root: np.ndarray | None, order: np.ndarray | None) -> Any:
        items = self._items[leaf]
        if (leaf, -1) not in self._places:
            result = concatenate(self._small_parts[leaf])
        else:
            assert root is not None
            offset = self._places[leaf, -1]
            length = sum(item.shape[0] for item in items)
            result = view_in(root, offset, (length, *items[0].shape[1:]), items[0].dtype)
            start = 0
            for voter, item in enumerate(items):
                view = self._views[voter][leaf]
                if view is not None:  # small parts lie in the slots, large parts are in place already
                    result[start : start + item.shape[0]] = view
                start += item.shape[0]
        self._check_order(leaf, len(result), order)
        if order is not None:
            ordered = np.empty_like(result)
            ordered[order] = result
            result = ordered
        return _tensor(result, items[0].is_tensor)


class Destination(Thing):
    """Where the large outputs of a plan's calls go at once. An order names it in place of the plan.

    Attributes
    ----------
    known : frozenset of int
        The numbers that a rank must know besides those of the plan.
    """

    kind = "destination"

    def __init__(self, registry: Any, plan: int, result: Segment, places: dict[int, list[tuple[int, int]]]) -> None:
        super().__init__(registry, [result])
        self._plan, self._result, self._places = plan, result.id, places
        self.known = frozenset(self.numbers())

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        return (self._plan, self._result, self._places[rank]), ()


def _in_place(leaves: Sequence[Leaf], positions: list[int]) -> tuple[Leaf, ...]:
    """Return a rank's leaves, one for each leaf of the common skeleton."""
    return tuple(leaves[k] if k != MISSING else _ABSENT for k in positions)


def _describe(skeleton: Any) -> str:
    """Return the structure of a result in words, for instance ``(value, {'a': value})``."""
    leaves, structure = flatten(skeleton)
    return repr(unflatten(structure, [_Value()] * len(leaves)))


def _name_of(item: Leaf, op: Op) -> str:
    if item.dtype is None:
        return "int" if isinstance(op, Reduction) and not item.shape else "an object"
    return describe_dtype(item.value_dtype)


def _are_integers(items: Sequence[Leaf]) -> bool:
    """Whether ranks have returned ints of Python and, beside them, numbers of one integer dtype of NumPy."""
    dtypes = {item.value_dtype for item in items if item.dtype is not None}
    return not any(item.shape for item in items) and len(dtypes) == 1 and dtypes.pop().kind in "iu"


class _Value:
    def __repr__(self) -> str:
        return "value"


def _is_tabular(part: Any) -> bool:
    return is_table(part) or isinstance(part, SliceValues)


def _tensor(value: Any, is_tensor: bool) -> Any:
    """Return a new value as a tensor on its memory if the function returned a tensor, and records as a recarray."""
    if is_tensor and isinstance(value, (np.ndarray, np.generic)):
        return tensor_of(np.asarray(value))
    return as_recarray(value) if isinstance(value, np.ndarray) else value


def view_in(root: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array that lies in the buffer of the large outputs."""
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return root[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)


def _own(array: np.ndarray) -> Any:
    """Return what the caller may keep: a copy of a slot, a view of a leased buffer, or a scalar."""
    if array.ndim == 0:
        return array.copy()[()]
    return array.copy() if array.nbytes < LARGE_NBYTES else array


def loaded(data: bytes, name: str, rank: int, what: str = "its structure") -> Any:
    """Load a part of a result, which runs code of the user's classes.

    Raises
    ------
    SerializationError
    """
    try:
        return pickle.loads(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # The user's classes run code here. Whatever they raise must not end the session.
        raise SerializationError(
            f"cannot load a result of {name!r} from rank {rank} ({what}): {text_of(error)}. "
            "Return arrays, numbers or objects whose class can be loaded in the program."
        ) from error
