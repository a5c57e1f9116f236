"""Plain values come back from a file as they were, and a file runs no code."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.seeds import examples
from support.told import told

from synk._pure import plain_values


def back(value: Any) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        plain_values.write(value, file)  # type: ignore[arg-type]
        file.flush()
        return plain_values.read(file.name)


keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
dtypes = st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.complex_number_dtypes())
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    | st.sets(st.integers())
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@examples(50)
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert told(back(value)) == told(value)


def test_other_values_come_back(subtests: Any) -> None:
    """Scalars, dates, texts, records, lone surrogates, bytes without meaning, tensors, bfloat16 of ml_dtypes."""
    record = np.zeros(2, [("a", "i4"), ("b", "f8", 2)])
    values: list[Any] = [np.float32(1.5), np.array(["x", "yz"]), np.datetime64("2020-01-01"), record, "\ud800", 2**200]
    values += [np.void(b"12345678"), np.array([b"123", b"456"], "V3")]
    values += [np.arange(4).astype(pytest.importorskip("ml_dtypes").bfloat16)]
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16", "float64", "int64", "bool", "complex64", "float8_e4m3fn"):
        values.append({"a": [torch.arange(6).to(getattr(torch, dtype)).reshape(2, 3).t()]})
    for value in values:
        with subtests.test(value=repr(value)):
            assert told(back(value)) == told(value)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trap",)


def test_other_files_are_refused_and_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = io.BytesIO()
    plain_values.write({"a": np.arange(1000.0)}, good)
    whole = good.getvalue()
    pickled, arrays, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pickle.dump(Trap(), pickled)
    np.savez(arrays, x=np.ones(2))
    np.savez(objects, values=np.array([Trap()], object), allow_pickle=True)
    flipped = bytearray(whole)
    flipped[2000] ^= 1
    for number, data in enumerate(
        (pickled.getvalue(), arrays.getvalue(), objects.getvalue(), b"", whole[:-100], whole[:500], bytes(flipped))
    ):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"cannot load .*expected a file that save"):
            plain_values.read(path)
    assert not (tmp_path / "trap").exists()
    with pytest.raises(FileNotFoundError):
        plain_values.read(tmp_path / "none")
