"""64-bit digests of arrays, the same for any mesh and sharding, on devices and in NumPy.

A word is the bits of an element of one to four bytes (an element of eight bytes is two words). Each
word is mixed with its position in the array. The digest is two sums modulo 2^32: of the mixed
words, and of the mixed words times an odd number that depends on the position.

It detects every change of a single word, because at a fixed position the mixing is one-to-one. It
misses about one in 2^59 of all other accidental changes (several words, swapped rows, zeroed or
shifted blocks). In arrays of over 2^32 words, positions coincide modulo 2^32, and a swap of two
words at such positions is not detected.

It does not detect another shape or dtype with the same bits (compare those separately), nor
deliberate changes: it is not a cryptographic hash. Floats are compared as bits: -0.0 differs from
0.0, and a NaN equals itself.
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
"""Words that NumPy processes at a time."""


def digest(x: jax.Array) -> jax.Array:
    """Returns the digest, uint32[2], of an array with elements of 1, 2, 4 or 8 bytes. Traceable;
    reads the array once, without a copy.

    Under jit with a sharded array, devices exchange two words per mesh axis that shards it.
    """
    words = _device_words(jnp.atleast_1d(x))
    position = jnp.uint32(0)
    for axis, stride in enumerate(_strides(words.shape)):
        position = position + lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(
            stride
        )
    # One reduction computes both sums: with two, XLA's CPU backend stores the mixed words, which
    # takes ten times as long.
    zero, every = np.uint32(0), tuple(range(words.ndim))
    return jnp.stack(
        lax.reduce(
            _mixed(words, position), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), every
        )
    )


def digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"params/blocks.mlp.up.weight": 16 hex digits, ...} for all leaves of nested dicts of
    jax.Arrays, in one program.

    All processes must call it and get the same result. It waits for the arrays, and neither changes
    nor moves them.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if not leaves:
        return {}
    arrays = [leaf for _, leaf in leaves]
    meshes = [x.sharding.mesh for x in arrays if isinstance(x.sharding, jax.NamedSharding)]
    replicated = jax.NamedSharding(meshes[0], jax.P()) if meshes else None
    sums = np.asarray(jax.jit(_of_all, out_shardings=replicated)(arrays))
    return {leaf_name(path): _hex(*row) for (path, _), row in zip(leaves, sums, strict=True)}


def hexadecimal(sums: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Converts results of `digest` to 16 hex digits each, as in `digests`."""
    return {name: _hex(*x) for name, x in sums.items()}


def leaf_name(path: Any) -> str:
    """Returns a leaf's name, such as "params/blocks.mlp.up.weight", from its jax.tree_util path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def combined(digests: Mapping[str, str]) -> str:
    """Returns the digest of a tree, 16 hex digits, from the names and digests of its leaves."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()[:16]


def host_digest(x: np.ndarray) -> str:
    """Computes an array's digest as in `digests` with NumPy, a MiB at a time; the array may be
    memory-mapped or strided.
    """
    return joined([host_sums(x, (0,) * x.ndim, x.shape)])


def host_sums(part: np.ndarray, corner: Sequence[int], shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the sums of one part of an array of this shape, for `joined`. corner: index at which
    the part starts.
    """
    words = _host_words(np.atleast_1d(part))
    strides = _strides((*(shape or (1,)), *words.shape[max(1, part.ndim) :]))
    begin = sum(at * stride for at, stride in zip(corner, strides, strict=False))
    first = second = 0
    for piece, start in _parts(words, begin, strides):
        position = np.uint32(start % 2**32)
        for axis, stride in enumerate(strides[words.ndim - piece.ndim :]):
            index = np.arange(piece.shape[axis], dtype=np.uint64) * np.uint64(stride)
            position = position + index.astype(np.uint32).reshape(
                -1, *[1] * (piece.ndim - 1 - axis)
            )
        mixed, weighted = _mixed(piece.astype(np.uint32), position)
        first, second = (
            first + int(mixed.sum(dtype=np.uint64)),
            second + int(weighted.sum(dtype=np.uint64)),
        )
    return first, second


def joined(sums: Iterable[tuple[int, int]]) -> str:
    """Returns the digest of an array, 16 hex digits, from the `host_sums` of its parts."""
    first = second = 0
    for mixed, weighted in sums:
        first, second = first + mixed, second + weighted
    return _hex(first % 2**32, second % 2**32)


def _of_all(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([digest(x) for x in arrays])


def _mixed(words: Any, position: Any) -> tuple[Any, Any]:
    """Returns the terms of both sums, as jax.Arrays or NumPy arrays."""
    salt = _shuffled(position + np.uint32(0x9E3779B9))
    mixed = _shuffled(words ^ salt)
    return mixed, mixed * (salt | np.uint32(1))


def _shuffled(x: Any) -> Any:
    """Permutes uint32, each input bit affecting all output bits: lowbias32 of C. Wellons
    (github.com/skeeto/hash-prospector).
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Returns row-major strides modulo 2^32, made odd if there are more positions than that, so
    that every axis counts.
    """
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
    """Yields views of at most _CHUNK words, without leading axes where those have length 1, and the
    position of their first word.
    """
    rows = _CHUNK // max(1, math.prod(words.shape[1:]))
    for row in range(0, words.shape[0], max(1, rows)):
        begin = start + row * strides[0]
        if rows or words.ndim == 1:
            yield words[row : row + rows], begin
        else:
            yield from _parts(words[row], begin, strides[1:])


def _hex(first: int, second: int) -> str:
    return f"{first:08x}{second:08x}"
