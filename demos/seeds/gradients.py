"""All gradients together: their joint norm, and flat buffers in place of many arrays.

The code uses operators and methods that NumPy, CuPy, torch and JAX share. Only joining arrays has another name in each
library.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from synk.extensions._rule import Array, Tree, is_real, kind_of

__all__ = ["clip_by_global_norm", "flatten"]


def clip_by_global_norm(grads: Tree, max_norm: float) -> tuple[Tree, Array]:
    """Scale all gradients down by one factor, so that their joint norm is at most ``max_norm``.

    ``g <- g min(1, max_norm / (norm + 1e-6))``, with ``norm`` the square root of the sum of all squares. Nothing is
    copied to the host: on a device the call does not wait.

    Parameters
    ----------
    grads : tree of arrays
    max_norm : float
        A number above 0. With infinity the norm is computed and nothing is clipped.

    Returns
    -------
    clipped : tree of arrays
        New arrays, with the structure, shapes and dtypes of ``grads``.
    norm : 0-d array
        The norm before clipping, in the widest dtype of the gradients, at least float32.

    Raises
    ------
    ValueError
        If ``max_norm`` is not a positive number.

    Notes
    -----
    The result equals that of `torch.nn.utils.clip_grad_norm_`, also for gradients that are not finite: an infinite norm
    gives zeros, and NaN where the gradient is infinite; NaN anywhere gives NaN everywhere. Source: Pascanu, Mikolov and
    Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, arXiv:1211.5063.

    Examples
    --------
    >>> import numpy as np
    >>> clipped, norm = clip_by_global_norm({"w": np.array([3.0, 0.0]), "b": np.array([4.0])}, max_norm=2.5)
    >>> clipped["w"].round(4), clipped["b"].round(4), float(norm)
    (array([1.5, 0. ]), array([2.]), 5.0)
    """
    if not is_real(max_norm) or not max_norm > 0:
        raise ValueError(
            f"cannot clip gradients: got a maximal norm of {max_norm!r}, expected a number above 0. Common values are "
            "0.1 to 10; infinity measures without clipping."
        )
    leaves, spec = optree.tree_flatten(grads)
    norm = sum(((wide := _at_least_float32(leaf)) * wide).sum() for leaf in leaves) ** 0.5
    excess = (norm + 1e-6) / float(max_norm)
    factor = 1 / (excess * (excess >= 1) + (excess < 1))  # 1 / max(excess, 1); 1 stays exactly 1
    return spec.unflatten([leaf * _as_dtype(factor, leaf.dtype) for leaf in leaves]), norm


def flatten(tree: Tree) -> tuple[tuple[Array, ...], Callable[[Sequence[Array]], Tree]]:
    """Copy a tree of arrays into flat buffers, one for each dtype, so that one collective per dtype moves all of them.

    Parameters
    ----------
    tree : tree of arrays
        The arrays must be of one library and on one device.

    Returns
    -------
    flats : tuple of 1-d arrays
        One new array for each dtype, in order of first appearance. Most trees have one dtype.
    unflatten : callable
        ``unflatten(flats)`` returns a tree with the structure and shapes of ``tree``. Its arrays are views of the flat
        ones if the library has views.

    Raises
    ------
    TypeError
        If a leaf is not an array.
    ValueError
        From ``unflatten``, if the number of buffers or their lengths differ from those of ``flatten``.

    Examples
    --------
    >>> import numpy as np
    >>> (flat,), unflatten = flatten({"w": np.ones((2, 2)), "b": np.zeros(1)})
    >>> flat
    array([0., 1., 1., 1., 1.])
    >>> unflatten([2 * flat])
    {'w': array([[2., 2.],
           [2., 2.]]), 'b': array([0.])}
    """
    leaves, spec = optree.tree_flatten(tree)
    groups: dict[str, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                f"cannot flatten {spec.accessors()[index].codify('tree')}: got {kind_of(leaf)}, expected an array. "
                "Convert it, for instance by numpy.asarray."
            )
        groups.setdefault(str(leaf.dtype), []).append(index)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    sizes = [sum(math.prod(shapes[index]) for index in group) for group in groups.values()]
    flats = tuple(_concatenate([leaves[index].reshape(-1) for index in group]) for group in groups.values())

    def unflatten(flats: Sequence[Array]) -> Tree:
        if [tuple(flat.shape) for flat in flats] != [(size,) for size in sizes]:
            raise ValueError(
                f"cannot unflatten buffers: got shapes {[tuple(flat.shape) for flat in flats]}, expected "
                f"{[(size,) for size in sizes]}. Pass one 1-d buffer for each that flatten returned, in its order."
            )
        restored: list[Array] = [None] * len(shapes)
        for flat, group in zip(flats, groups.values(), strict=True):
            start = 0
            for index in group:
                stop = start + math.prod(shapes[index])
                restored[index] = flat[start:stop].reshape(shapes[index])
                start = stop
        return spec.unflatten(restored)

    return flats, unflatten


def _concatenate(arrays: list[Array]) -> Array:
    """Join 1-d arrays of one dtype. Only libraries that are imported already can have made them."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        return torch.cat(arrays)
    if jax is not None and isinstance(arrays[0], jax.Array):
        return jax.numpy.concatenate(arrays)
    # CuPy's arrays answer NumPy's functions, dpnp's only those of their own namespace.
    xp: Any = arrays[0].__array_namespace__() if hasattr(arrays[0], "__array_namespace__") else np
    return xp.concatenate(arrays)


def _at_least_float32(array: Array) -> Array:
    """Return an array of half precision as float32, in which its squares cannot overflow; other arrays unchanged."""
    if "float16" not in str(array.dtype):
        return array
    return array.float() if hasattr(array, "float") else array.astype("float32")


def _as_dtype(array: Array, dtype: Any) -> Array:
    return array.to(dtype) if hasattr(array, "to") else array.astype(dtype)
