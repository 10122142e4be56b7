"""64-bit digests of arrays: the same on any mesh, in any sharding, on the devices and by NumPy.

A word is an element's bits, one to four bytes of them (an element of eight bytes is two words). Each word is mixed with its place in the
array, and two sums over all words wrap around at 2^32: one of the mixed words, one of them times an odd number that the place decides.

What it finds. Any change of a single word, always: at a fixed place the mixing is one-to-one. Any other change that has nothing to do with
these formulas (several words, swapped rows, zeroed or shifted blocks), but for one in about 2^59. In an array of over 2^32 words places
coincide modulo 2^32, and two words of such places may swap unseen.

What it does not find. Another shape or dtype of the same bits: compare those apart. A change made by someone who knows the formulas: it is
no signature. Floats are compared as bits: -0.0 is not 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_CHUNK = 1 << 18
"""Words that NumPy has in hand at a time."""


def digest(x: jax.Array) -> jax.Array:
    """uint32[2] of an array of any shape whose elements have 1, 2, 4 or 8 bytes. Traceable; reads the array once and keeps nothing of it.

    Under jit with a sharded array, devices exchange two words for each mesh axis that cuts it.
    """
    words = _device_words(jnp.atleast_1d(x))
    position = jnp.uint32(0)
    for axis, stride in enumerate(_strides(words.shape)):
        position = position + lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
    # One reduction of both: XLA's CPU backend would keep the mixed words in memory for two, at ten times the time.
    zero, every = np.uint32(0), tuple(range(words.ndim))
    return jnp.stack(lax.reduce(_mixed(words, position), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), every))


def digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """{"params/blocks.mlp.up.weight": 16 hex digits, ...} of all leaves of nested dicts of jax.Arrays, by one program.

    Every process of a run calls it, and gets the same. It waits for the arrays; it neither changes nor moves them.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if not leaves:
        return {}
    arrays = [leaf for _, leaf in leaves]
    meshes = [x.sharding.mesh for x in arrays if isinstance(x.sharding, jax.NamedSharding)]
    everywhere = jax.NamedSharding(meshes[0], jax.P()) if meshes else None
    found = np.asarray(jax.jit(_of_all, out_shardings=everywhere)(arrays))
    return {leaf_name(path): _hex(*row) for (path, _), row in zip(leaves, found, strict=True)}


def hexadecimal(found: Mapping[str, np.ndarray]) -> dict[str, str]:
    """16 hex digits of each, as `digests` gives them, of what `digest` has made."""
    return {name: _hex(*x) for name, x in found.items()}


def leaf_name(path: Any) -> str:
    """ "params/blocks.mlp.up.weight" of a leaf of nested dicts, from its path in jax.tree_util."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def combined(digests: Mapping[str, str]) -> str:
    """16 hex digits of a tree, from those of its leaves and their names."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()[:16]


def host_digest(x: np.ndarray) -> str:
    """The same 16 hex digits as `digests` gives, by NumPy, a MiB at a time: also of a memory-mapped array, or one of any strides."""
    return joined([host_sums(x, (0,) * x.ndim, x.shape)])


def host_sums(part: np.ndarray, corner: Sequence[int], shape: tuple[int, ...]) -> tuple[int, int]:
    """What a part of an array of this shape adds to its digest; `joined` makes one of all parts. corner: where the part begins."""
    words = _host_words(np.atleast_1d(part))
    strides = _strides((*(shape or (1,)), *words.shape[max(1, part.ndim) :]))
    begin = sum(at * stride for at, stride in zip(corner, strides, strict=False))
    first = second = 0
    for piece, start in _parts(words, begin, strides):
        position = np.uint32(start % 2**32)
        for axis, stride in enumerate(strides[words.ndim - piece.ndim :]):
            index = np.arange(piece.shape[axis], dtype=np.uint64) * np.uint64(stride)
            position = position + index.astype(np.uint32).reshape(-1, *[1] * (piece.ndim - 1 - axis))
        one, other = _mixed(piece.astype(np.uint32), position)
        first, second = first + int(one.sum(dtype=np.uint64)), second + int(other.sum(dtype=np.uint64))
    return first, second


def joined(sums: Iterable[tuple[int, int]]) -> str:
    """The 16 hex digits of an array, from the `host_sums` of its parts."""
    first = second = 0
    for one, other in sums:
        first, second = first + one, second + other
    return _hex(first % 2**32, second % 2**32)


def _of_all(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([digest(x) for x in arrays])


def _mixed(words: Any, position: Any) -> tuple[Any, Any]:
    """The terms of both sums, in jax.Arrays or in NumPy's."""
    salt = _shuffled(position + np.uint32(0x9E3779B9))
    mixed = _shuffled(words ^ salt)
    return mixed, mixed * (salt | np.uint32(1))


def _shuffled(x: Any) -> Any:
    """A one-to-one map of uint32 that spreads each bit over all: lowbias32 of C. Wellons (github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a row-major array, modulo 2^32; odd where there are more positions than that, so that no axis drops out."""
    large = math.prod(shape) > 2**32
    exact = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [(stride | 1 if large else stride) % 2**32 for stride in exact]


def _device_words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def _host_words(x: np.ndarray) -> np.ndarray:
    if x.dtype.itemsize == 8:
        return x[..., None].view(np.uint32)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def _parts(words: np.ndarray, start: int, strides: list[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Views of at most _CHUNK words, which lack leading axes where those are cut to single rows, and the position of their first word."""
    rows = _CHUNK // max(1, math.prod(words.shape[1:]))
    for row in range(0, words.shape[0], max(1, rows)):
        here = start + row * strides[0]
        if rows or words.ndim == 1:
            yield words[row : row + rows], here
        else:
            yield from _parts(words[row], here, strides[1:])


def _hex(first: int, second: int) -> str:
    return f"{first:08x}{second:08x}"
