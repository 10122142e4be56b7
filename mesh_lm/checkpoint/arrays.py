"""Reads a checkpoint's arrays in parts, without a mesh or a model, so that any machine can verify
and compare them.

A part is the shard of one array that one device wrote; at most two parts are in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from mesh_lm import strict_json
from mesh_lm.checkpoint.reader import DamagedCheckpoint, misnamed, parts_of
from mesh_lm.state.digest import host_sums, joined

_PIECE = 1 << 18
"""Elements that NumPy compares at a time."""

Box = tuple[slice, ...]


class StoredArray:
    """One array on disk. Reading it raises DamagedCheckpoint if that fails."""

    def __init__(self, path: Path, name: str, store: ts.TensorStore) -> None:
        self._path, self._name, self._store = path, name, store
        self.shape = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype
        self.part = tuple(
            step or size
            for step, size in zip(
                store.chunk_layout.read_chunk.shape or (), self.shape, strict=False
            )
        )
        """Shape of one part; smaller at the end of an axis that it does not divide."""

    @property
    def described(self) -> list[Any]:
        """[*shape, dtype], as in `SavedCheckpoint.metadata`."""
        return [*self.shape, str(self.dtype)]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def boxes(self) -> Iterator[Box]:
        """Yields the slices of each part, in row-major order."""
        rows = (
            [slice(at, min(at + step, size)) for at in range(0, size, step)]
            for size, step in zip(self.shape, self.part, strict=True)
        )
        return itertools.product(*rows)

    def __getitem__(self, box: Box) -> np.ndarray:
        with _readable(self._path, self._name):
            return np.asarray(self._store[box].read().result())

    def digest(self) -> str:
        """Returns the digest of the array, 16 hex digits, as `mesh_lm.state.digest` does."""
        return joined(
            host_sums(self[box], [side.start for side in box], self.shape) for box in self.boxes()
        )

    def distance(self, other: StoredArray) -> tuple[int, float]:
        """Returns how many elements differ bitwise from an array of the same shape and dtype, and
        the largest |a - b| (may be NaN).
        """
        grid = self if math.prod(self.part) >= math.prod(other.part) else other
        count, largest = 0, 0.0
        for box in grid.boxes():
            part_a, part_b = self[box].reshape(-1), other[box].reshape(-1)
            for at in range(0, part_a.size, _PIECE):
                a, b = part_a[at : at + _PIECE], part_b[at : at + _PIECE]
                changed = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(axis=1)
                if changed.any():
                    count += int(changed.sum())
                    largest = float(
                        np.maximum(
                            largest,
                            np.abs(
                                a[changed].astype(np.float64) - b[changed].astype(np.float64)
                            ).max(),
                        )
                    )
        return count, largest


class StoredArrays:
    """The arrays of one checkpoint by name, such as "params/blocks.mlp.up.weight". Opening it reads
    only their index.
    """

    def __init__(self, path: Path) -> None:
        """path: a checkpoint, renamed or not. Raises DamagedCheckpoint if the index or the list of
        arrays cannot be read.
        """
        self.path = path
        self._store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path / 'state'}/"}}
        # for the index, not for arrays
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})
        with _readable(path, "the list of its arrays"):
            listed = strict_json.read(path / "state" / "_METADATA", size=strict_json.LARGE_FILE)[
                "tree_metadata"
            ].values()
            keys = [[str(key["key"]) for key in leaf["key_metadata"]] for leaf in listed]
            stored = ts.KvStore.open(self._store, context=self._context).result().list().result()
        self._stored = {
            key.decode().removesuffix("/zarr.json") for key in stored if key.endswith(b"/zarr.json")
        }
        self._names = {"/".join(each): ".".join(each) for each in keys}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> StoredArray:
        """Returns an array. Raises DamagedCheckpoint if its description is missing or
        unreadable.
        """
        if self._names[name] not in self._stored:
            raise DamagedCheckpoint(self.path, [f"{name}: is missing"])
        spec = {"driver": "zarr3", "kvstore": self._store | {"path": f"{self._names[name]}/"}}
        with _readable(self.path, name):
            return StoredArray(
                self.path, name, ts.open(spec, context=self._context, open=True, read=True).result()
            )

    def verified(self, metadata: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Yields (bytes, problem or "") for every array that is stored or that `metadata`
        describes.
        """
        digests = metadata.get("digests", {})
        wanted = {
            f"{part}/{name}": leaf
            for part, leaves in parts_of(metadata).items()
            for name, leaf in leaves.items()
        }
        for name in dict.fromkeys([*self, *digests, *wanted]):
            if name not in self._names:
                yield 0, f"{name}: is not in the list of arrays"
            elif digests and name not in digests:
                yield 0, f"{name}: was not saved: it has no digest"
            else:
                try:
                    leaf = self[name]
                    problem = _problem(name, leaf, wanted.get(name), digests.get(name))
                    if name == "step" and not problem and "step" not in metadata:
                        problem = self._other_step(int(leaf[()]))
                    yield leaf.nbytes, problem
                except DamagedCheckpoint as damage:
                    yield 0, damage.reasons[0]

    def _other_step(self, step: int) -> str:
        number = self.path.name.partition(".")[0]
        return misnamed(step) if number.isdecimal() and int(number) != step else ""


def _problem(name: str, leaf: StoredArray, wanted: list[Any] | None, saved_as: str | None) -> str:
    if wanted and leaf.described != wanted:
        return f"{name}: {leaf.described}, saved as {wanted}"
    actual = leaf.digest()
    return "" if saved_as in (None, actual) else f"{name}: digest {actual}, saved as {saved_as}"


@contextlib.contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """Turns any error into DamagedCheckpoint, because TensorStore has no error class of its own."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0][:300]
        raise DamagedCheckpoint(path, [f"{what}: cannot be read: {reason}"]) from error
