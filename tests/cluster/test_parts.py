"""Messages with arrays: what is packed comes out again, and the arrays are not copied when they are unpacked."""

from __future__ import annotations

import collections
import os
from typing import Any

import numpy as np
import pytest

from synk._wire.channel import ProtocolError
from synk._wire.descriptors import packet_pair, pipe
from synk.cluster.channel import NodeChannel, Parts, unpacked, with_code

Pair = collections.namedtuple("Pair", "first second")


def parts_of(nbytes: int) -> dict[str, Any]:
    return {
        "large": np.arange(nbytes // 8, dtype=np.float64),
        "gaps": np.arange(20)[::3],
        "text": "x" * 100,
        "pair": Pair(np.zeros((0, 3)), np.array(["a", "bc"])),
        "record": np.zeros(3, "i4,f8"),
    }


def assert_same(got: Any, want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for key in ("large", "gaps", "record"):
        np.testing.assert_array_equal(got[key], want[key])
    assert got["text"] == want["text"]
    assert type(got["pair"]) is Pair
    assert got["pair"].first.shape == (0, 3)
    assert got["pair"].second.tolist() == ["a", "bc"]


def test_what_is_packed_comes_out() -> None:
    want = parts_of(1 << 12)
    for pack in (Parts.of, with_code):
        joined = pack(want).joined()
        assert len(joined) == len(pack(want))
        assert_same(unpacked(joined), want)


class Named(np.ndarray):
    """Has an attribute."""


def test_a_reply_keeps_views_and_attributes() -> None:
    array = np.arange(3.0).view(Named)
    array.unit = "m"  # type: ignore[attr-defined]
    view, copy = unpacked(with_code((memoryview(np.arange(4)), array)).joined())
    assert (type(view), view.format, view.tolist()) == (memoryview, "l", [0, 1, 2, 3])
    assert (type(copy), copy.unit, copy.tolist()) == (Named, "m", [0.0, 1.0, 2.0])


@pytest.fixture
def pair() -> Any:
    ours, theirs = packet_pair()
    import socket

    ends = [pipe(), pipe()]
    one = NodeChannel(ours, ends[0][0], ends[1][1], b"t" * 32)
    other = NodeChannel(socket.socket(fileno=os.dup(theirs)), ends[1][0], ends[0][1], b"t" * 32)
    yield one, other
    one.close()
    other.close()


def test_a_message_with_another_token_is_refused(pair: Any) -> None:
    one, other = pair
    one._token = b"u" * 32
    one.send_body(7, Parts.of(1))
    with pytest.raises(ProtocolError, match="token"):
        other.receive_body(7)
