"""News that a rank has not taken in to their end, and what was sent before the program knew of that."""

from __future__ import annotations

import pytest

import synk


def news(heard: int, parcels: list[tuple[int, bytes, bool]]) -> tuple[object, ...]:
    return [], parcels, [], None, None, heard


def test_what_comes_after_news_that_were_broken_off_is_not_read_until_the_program_knows() -> None:
    """It may need what they would have brought: a function, or the value of an object."""
    with synk.fork(0) as rt:
        rank = rt._session.by_rank[0].process._rank
        rank._learn(5, news(4, []), [])
        with pytest.raises(Exception, match="load key"):
            rank._learn(6, news(5, [(10**6, b"no pickle", False)]), [])
        for number in (7, 8):  # which were sent when the answer to the fifth had come
            with pytest.raises(RuntimeError, match="broken off"):
                rank._learn(number, news(5, []), [])
        with pytest.raises(RuntimeError, match="broken off"):
            rank._learn(9, None, [])
        rank._learn(9, news(9, []), [])
        rank._learn(10, news(9, []), [])
