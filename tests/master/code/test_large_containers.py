"""A change in a large container is seen by the next call, whichever element it is.

The expected values come from the same function, called by plain Python in this process on the same objects.
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.names import named

X = np.arange(2.0)
SIZES = (1_000, 10_001, 100_000)

CONTAINERS: dict[str, Callable[[int], Any]] = {
    "dict": lambda n: {f"k{i}": i for i in range(n)},
    "dict by number": lambda n: {i: float(i) for i in range(n)},
    "OrderedDict": lambda n: OrderedDict((i, i) for i in range(n)),
    "defaultdict": lambda n: defaultdict(int, {i: i for i in range(n)}),
    "set": lambda n: set(range(n)),
    "list": lambda n: [*range(n)],
    "deque": lambda n: deque(range(n)),
    "list of dicts": lambda n: [{"k": i} for i in range(n)],
    "list of tuples": lambda n: [(i, str(i)) for i in range(n)],
    "dict of lists": lambda n: {i: [i] for i in range(n)},
    "list of arrays": lambda n: [np.full(2, i) for i in range(n // 50)],
    "list of instances": lambda n: [SimpleNamespace(k=i) for i in range(n // 50)],
}


def add(held: Any, where: int, n: int) -> None:
    if isinstance(held, dict):
        held[f"new {n}"] = type(next(iter(held.values())))()
    elif isinstance(held, set):
        held.add(-n)
    else:
        held.append(type(held[0])() if isinstance(held[0], (dict, tuple)) else held[0])


def remove(held: Any, where: int, n: int) -> None:
    if isinstance(held, (dict, set)):
        key = [*held][where]
        held.pop(key) if isinstance(held, dict) else held.discard(key)
    else:
        del held[where]


def replace(held: Any, where: int, n: int) -> None:
    if isinstance(held, set):
        held.discard([*held][where])
        held.add(-n)
    else:
        key = [*held][where] if isinstance(held, dict) else where
        held[key] = -n


def within(held: Any, where: int, n: int) -> None:
    """Change an element in place, where it can be."""
    element = [*held.values()][where] if isinstance(held, dict) else None if isinstance(held, set) else held[where]
    if isinstance(element, dict):
        element[f"k{n}"] = n
    elif isinstance(element, list):
        element.append(n)
    elif isinstance(element, np.ndarray):
        element[0] = -n
    elif isinstance(element, SimpleNamespace):
        element.k = -n
    else:
        replace(held, where, n)


def shown(held: Any) -> Any:
    """Return what a container holds, in order, as a text that is short and that any change changes."""
    items = held.items() if isinstance(held, dict) else sorted(held, key=repr) if isinstance(held, set) else held
    return type(held).__name__, len(held), zlib.crc32(str([*items]).encode())


def test_any_change_of_a_large_container_is_seen_by_the_next_call(subtests: Any, shared_runtimes: Any) -> None:
    rt, rng = shared_runtimes[2], random.Random(22)
    for name in CONTAINERS:
        size = rng.choice(SIZES)
        held = CONTAINERS[name](size)
        f = rt.function(named(name, lambda x, held=held: shown(held)), outputs="first")
        acts = [rng.choice([add, remove, replace, within]) for _ in range(4)]
        with subtests.test(container=name, size=size, acts=[act.__name__ for act in acts]):
            assert f(X) == shown(held)
            for number, act in enumerate(acts, start=1):
                act(held, rng.randrange(len(held)), number)
                assert f(X) == shown(held), act.__name__
