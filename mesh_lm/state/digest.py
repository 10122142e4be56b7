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

from mesh_lm.state.placement import copied_to_device, is_on_host

_CHUNK = 1 << 18
"""Words that NumPy processes at a time."""


def digest(x: jax.Array) -> jax.Array:
    """Returns the digest, uint32[2], of an array with elements of 1, 2, 4 or 8 bytes.

    Traceable; reads the array once, without a copy. Under jit with a sharded array, devices
    exchange two words per mesh axis that shards it.
    """
    words = _device_words(jnp.atleast_1d(x))
    position = jnp.uint32(0)
    for axis, stride in enumerate(_strides(words.shape)):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position = position + index * np.uint32(stride)
    # One reduction computes both sums: with two, XLA's CPU backend stores the mixed words, which
    # takes ten times as long.
    zero = np.uint32(0)
    sums = lax.reduce(
        _mixed(words, position),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(sums)


def digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"params/blocks.mlp.up.weight": 16 hex digits, ...} for all leaves of nested dicts of
    jax.Arrays, in one program.

    All processes must call it and get the same result. It waits for the arrays, and neither changes
    nor moves them. Arrays on the hosts are copied to the devices one after another.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    found: dict[str, str] = {}
    on_device = []
    for path, leaf in leaves:
        if not is_on_host(leaf):
            on_device.append((path, leaf))
            continue
        copy = copied_to_device(leaf)
        found |= _device_digests([(path, copy)])
        copy.delete()
    found |= _device_digests(on_device)
    return {leaf_name(path): found[leaf_name(path)] for path, _ in leaves}


def _device_digests(leaves: list[tuple[Any, jax.Array]]) -> dict[str, str]:
    if not leaves:
        return {}
    arrays = [leaf for _, leaf in leaves]
    meshes = [x.sharding.mesh for x in arrays if isinstance(x.sharding, jax.NamedSharding)]
    replicated = jax.NamedSharding(meshes[0], jax.P()) if meshes else None
    sums = np.asarray(jax.jit(_stacked_digests, out_shardings=replicated)(arrays))
    return {leaf_name(path): _hex(*row) for (path, _), row in zip(leaves, sums, strict=True)}


def hexadecimal(sums: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Converts results of `digest` to 16 hex digits each, as in `digests`."""
    return {name: _hex(*x) for name, x in sums.items()}


def mismatches(actual: Mapping[str, str], saved: Mapping[str, str]) -> list[str]:
    """Returns a line for each leaf whose digest differs from the saved one.

    Leaves that are only in one of both are not compared.
    """
    return [
        f"{leaf}: digest {actual[leaf]}, saved as {digest}"
        for leaf, digest in saved.items()
        if actual.get(leaf, digest) != digest
    ]


def leaf_name(path: Any) -> str:
    """Returns a leaf's name, such as "params/blocks.mlp.up.weight", from its jax.tree_util path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def combined(digests: Mapping[str, str]) -> str:
    """Returns the digest of a tree, 16 hex digits, from the names and digests of its leaves."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()[:16]


def host_digest(x: np.ndarray) -> str:
    """Computes an array's digest as in `digests` with NumPy, a MiB at a time.

    The array may be memory-mapped or strided.
    """
    return joined([host_sums(x, (0,) * x.ndim, x.shape)])


def host_sums(part: np.ndarray, corner: Sequence[int], shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the sums of one part of an array of this shape, for `joined`.

    corner: the index in the array at which the part starts.
    """
    words = _host_words(np.atleast_1d(part))
    # Elements of eight bytes are two words: `words` has another axis, of length 2.
    strides = _strides((*(shape or (1,)), *words.shape[max(1, part.ndim) :]))
    start = sum(index * stride for index, stride in zip(corner, strides, strict=False))
    mixed_sum = 0
    weighted_sum = 0
    for chunk, chunk_start in _chunks(words, start, strides):
        position = np.uint32(chunk_start % 2**32)
        for axis, stride in enumerate(strides[words.ndim - chunk.ndim :]):
            offset = np.arange(chunk.shape[axis], dtype=np.uint64) * np.uint64(stride)
            later_axes = [1] * (chunk.ndim - 1 - axis)
            position = position + offset.astype(np.uint32).reshape(-1, *later_axes)
        mixed, weighted = _mixed(chunk.astype(np.uint32), position)
        mixed_sum += int(mixed.sum(dtype=np.uint64))
        weighted_sum += int(weighted.sum(dtype=np.uint64))
    return mixed_sum, weighted_sum


def joined(sums: Iterable[tuple[int, int]]) -> str:
    """Returns the digest of an array, 16 hex digits, from the `host_sums` of its parts."""
    mixed_sum = 0
    weighted_sum = 0
    for mixed, weighted in sums:
        mixed_sum += mixed
        weighted_sum += weighted
    return _hex(mixed_sum % 2**32, weighted_sum % 2**32)


def _stacked_digests(arrays: list[jax.Array]) -> jax.Array:
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
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if math.prod(shape) > 2**32:
        strides = [stride | 1 for stride in strides]
    return [stride % 2**32 for stride in strides]


def _device_words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def _host_words(x: np.ndarray) -> np.ndarray:
    if x.dtype.itemsize == 8:
        return x[..., None].view(np.uint32)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def _chunks(words: np.ndarray, start: int, strides: list[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Yields views of at most _CHUNK words, and the position of their first word.

    They are without leading axes where those have length 1.
    """
    n_rows = _CHUNK // max(1, math.prod(words.shape[1:]))
    for row in range(0, words.shape[0], max(1, n_rows)):
        row_start = start + row * strides[0]
        if n_rows or words.ndim == 1:
            yield words[row : row + n_rows], row_start
        else:  # one row has more words than a chunk
            yield from _chunks(words[row], row_start, strides[1:])


def _hex(first: int, second: int) -> str:
    return f"{first:08x}{second:08x}"
