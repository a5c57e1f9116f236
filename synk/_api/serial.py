"""``Function.serial``: a call whose rows all go to rank 0, with sharded variables as the arrays that they hold."""

from __future__ import annotations

from typing import Any

from synk._engine import collectives
from synk._engine.rows import CallOptions, closed_over_shards
from synk._engine.session import Session
from synk._engine.shared import Shared
from synk._engine.things import check_owner
from synk._pure.nested import build, holds, is_nested, take_apart
from synk._wire.apart import Whole, unassignable


def call_serially(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
    """Return the result of a call on one rank, which cannot read the shards of others: it gets them as arguments."""
    function = function._renewed()
    callee, session, verb = function._callee, function._bound_session(), function._verb
    with session.entered(verb):
        deadline = session.deadline(options.timeout)
        session.begin(verb, deadline)
        shards = closed_over_shards(session, callee)
        for each in function._options.updates:
            variable = each[0] if isinstance(each, tuple) else each
            if isinstance(variable, Shared) and variable.is_sharded:
                raise unassignable(variable.name, callee.name)
        given = [
            value if is_broadcast else _whole(session, value, label, callee.name)
            for label, _, is_broadcast, value in callee.signature.bind(args, kwargs)
        ]
        positional, named = given[: len(args)], dict(zip(kwargs, given[len(args) :]))
        values = [collectives.gather(variable, 0) for variable in shards]
    if not shards:
        return function._run(positional, named, options)
    whole = function._with_one_more(Whole, tuple(variable.number for variable in shards))
    return whole._run((tuple(values), *positional), named, options)


def _whole(session: Session, value: Any, label: str, name: str) -> Any:
    """Return an argument, with all rows of a sharded variable as an array."""
    if is_nested(value) and holds(value, Shared):
        leaves, structure = take_apart(value)
        return build(structure, iter([_whole(session, leaf, label, name) for leaf in leaves]))
    if not isinstance(value, Shared) or not value.is_sharded:
        return value
    variable = value._referent
    check_owner(variable.owner, session.variables, variable.label, f"{name!r} argument {label!r}")
    if variable.is_nested:
        raise TypeError(
            f"cannot call {name!r} serially: {label} is a nested sharded variable, whose rows would have to be passed "
            "as several inputs. Call it in parallel, or share its arrays one by one."
        )
    return collectives.gather(variable, 0)
