"""Data: an array in shared memory that is read, written and resized in place.

Run: python demos/02_data.py
"""

from __future__ import annotations

import numpy as np

import synk

synk.fork()
rng = np.random.default_rng(0)

small = rng.standard_normal((5, 4)).astype("float32")
x = synk.data(small)
print(x)
print("shape", x.shape, "length", len(x), "items allocated", x.alloc_size)
assert isinstance(x.data, np.ndarray)  # a NumPy view of the shared memory
assert np.array_equal(x, small)

# Reading and writing as with an array.
assert np.array_equal(x[2:4], small[2:4])
x[3] = 0
assert not x[3].any()
x[:] = 2 * small
assert np.array_equal(x, 2 * small)

# A larger value takes new memory; oversize= leaves room to grow.
medium = rng.standard_normal((2000, 10)).astype("float32")
x.set_value(medium, oversize=1.1)
print("set to 2000 rows with oversize=1.1: size", x.size, "items allocated", x.alloc_size)
assert x.alloc_size >= 1.1 * medium.size
allocated = x.alloc_size

# A value that fits takes none.
large = rng.standard_normal((2200, 10)).astype("float32")
x.set_value(large)
assert len(x) == 2200
assert x.alloc_size == allocated

# Shrinking and growing keeps the rows that fit.
x.set_length(2000)
assert np.array_equal(x, large[:2000])
x.set_length(2100)
assert np.array_equal(x[:2000], large[:2000])
x.set_shape((100, 8))
x[:] = 1
assert x.shape == (100, 8)
assert x.alloc_size == allocated

# Giving the memory back, then a value again.
x.free_memory()
tiny = rng.standard_normal((100, 8))
x.set_value(tiny, force_cast=True)  # the dtype is fixed at the start: float64 comes in as float32
print("after free_memory: shape", x.shape, "items allocated", x.alloc_size, "dtype", x.dtype)
assert x.alloc_size < allocated
assert np.array_equal(x, tiny.astype("float32"))
try:
    x.set_value(tiny)
except TypeError as error:
    print("without force_cast:", error)
else:
    raise AssertionError("a value of another dtype was taken")

# None of this sent a message: the workers learn of the new shape with the next call.
column_sums = synk.function(lambda x: x.sum(axis=0), outputs="sum")
assert np.allclose(column_sums(x), tiny.sum(axis=0), atol=1e-5)

synk.close()
print("All assertions passed.")
