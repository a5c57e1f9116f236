"""How the memory of ranks is divided, and what an array and its buffer share. No process."""

from __future__ import annotations

import numpy as np
import pytest

from synk._pure.tensors import array_of
from synk.communicators import Buffer
from synk.communicators._buffers import as_array, as_buffer, named_dtype
from synk.communicators._layout import ControlLayout, SegmentLayout, required_nbytes
from synk.errors import UnsupportedError


@pytest.mark.parametrize("world_size", (1, 2, 5, 64, 300))
def test_what_belongs_to_different_ranks_does_not_overlap(world_size: int) -> None:
    nbytes = required_nbytes(world_size)
    layout = SegmentLayout(nbytes, world_size)
    assert layout.half_nbytes % 64 == layout.ring_nbytes % 64 == 0
    assert layout.halves >= ControlLayout(world_size).nbytes
    assert layout.rings >= layout.halves + world_size * 2 * layout.half_nbytes
    assert layout.rings + world_size**2 * layout.ring_nbytes <= nbytes
    assert layout.half_nbytes >= (world_size + 1) * 64
    assert layout.ring_nbytes >= 64


def test_too_little_memory_for_a_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least"):
        required_nbytes(64, 1 << 12)


def test_an_array_and_its_buffer_are_the_same_memory() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    buffer = as_buffer(array)
    assert buffer == Buffer(array.ctypes.data, 6, "int16")
    as_array(buffer)[4] = 40
    assert array[1, 1] == 40
    assert as_array(Buffer(0, 0, "float32")).shape == (0,)
    with pytest.raises(ValueError, match="C-contiguous"):
        as_buffer(np.zeros((4, 4))[:, 1])


def test_bfloat16_is_as_torch_has_it_and_unknown_dtypes_are_refused() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(np.array([1.0, -2.5], np.float32)).bfloat16()
    assert as_array(as_buffer(array_of(tensor))).tobytes() == tensor.view(torch.int16).numpy().tobytes()
    for dtype in ("object", "datetime64[s]", "S3", "nonsense"):
        with pytest.raises(UnsupportedError, match="expected one of"):
            named_dtype(dtype)
