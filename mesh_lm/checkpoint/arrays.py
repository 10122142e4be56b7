"""The arrays of a checkpoint without a mesh or a model: read a part at a time, so that any machine can verify and compare them.

A part is what one device wrote of one array; one, or a pair of them, is all that is in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from mesh_lm.checkpoint.reader import DamagedCheckpoint, parts_of
from mesh_lm.state.digest import host_sums, joined

_PIECE = 1 << 18
"""Elements that NumPy has in hand at a time."""

Box = tuple[slice, ...]


class StoredArray:
    """One array on disk. Reading it raises DamagedCheckpoint where it cannot be read."""

    def __init__(self, path: Path, name: str, store: ts.TensorStore) -> None:
        self._path, self._name, self._store = path, name, store
        self.shape = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype
        self.part = tuple(step or size for step, size in zip(store.chunk_layout.read_chunk.shape or (), self.shape, strict=False))
        """Shape of what is read at a time: smaller at the end of an axis that it does not divide."""

    @property
    def described(self) -> list[Any]:
        """As `SavedCheckpoint.metadata` describes a parameter: [*shape, dtype]."""
        return [*self.shape, str(self.dtype)]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def boxes(self) -> Iterator[Box]:
        """The places of its parts, in rows."""
        rows = ([slice(at, min(at + step, size)) for at in range(0, size, step)] for size, step in zip(self.shape, self.part, strict=True))
        return itertools.product(*rows)

    def __getitem__(self, box: Box) -> np.ndarray:
        with _readable(self._path, self._name):
            return np.asarray(self._store[box].read().result())

    def digest(self) -> str:
        """The 16 hex digits that `mesh_lm.state.digest` gives of the whole array."""
        return joined(host_sums(self[box], [side.start for side in box], self.shape) for box in self.boxes())

    def distance(self, other: StoredArray) -> tuple[int, float]:
        """Elements whose bits differ from those of an array of the same shape and dtype, and the largest |a - b|; NaN where one is."""
        grid = self if math.prod(self.part) >= math.prod(other.part) else other
        count, far = 0, 0.0
        for box in grid.boxes():
            ours, theirs = self[box].reshape(-1), other[box].reshape(-1)
            for at in range(0, ours.size, _PIECE):
                a, b = ours[at : at + _PIECE], theirs[at : at + _PIECE]
                changed = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(axis=1)
                if changed.any():
                    count += int(changed.sum())
                    far = float(np.maximum(far, np.abs(a[changed].astype(np.float64) - b[changed].astype(np.float64)).max()))
        return count, far


class StoredArrays:
    """The arrays of one checkpoint by their names, "params/blocks.mlp.up.weight". Opening it reads their index and none of them."""

    def __init__(self, path: Path) -> None:
        """path: of a checkpoint, put aside or not. Raises DamagedCheckpoint where the index or the list of arrays cannot be read."""
        self.path = path
        self._store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path / 'state'}/"}}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})  # for the index, not for arrays
        with _readable(path, "the list of its arrays"):
            listed = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
            keys = [[str(key["key"]) for key in leaf["key_metadata"]] for leaf in listed]
            stored = ts.KvStore.open(self._store, context=self._context).result().list().result()
        self._stored = {key.decode().removesuffix("/zarr.json") for key in stored if key.endswith(b"/zarr.json")}
        self._names = {"/".join(each): ".".join(each) for each in keys}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> StoredArray:
        """Raises DamagedCheckpoint where its description is missing or cannot be read."""
        if self._names[name] not in self._stored:
            raise DamagedCheckpoint(self.path, [f"{name}: is missing"])
        spec = {"driver": "zarr3", "kvstore": self._store | {"path": f"{self._names[name]}/"}}
        with _readable(self.path, name):
            return StoredArray(self.path, name, ts.open(spec, context=self._context, open=True, read=True).result())

    def verified(self, metadata: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Of every array that is here or that `metadata` describes: its bytes, and what is wrong with it, or ""."""
        digests = metadata.get("digests", {})
        wanted = {f"{part}/{name}": leaf for part, leaves in parts_of(metadata).items() for name, leaf in leaves.items()}
        for name in dict.fromkeys([*self, *digests, *wanted]):
            if name not in self._names:
                yield 0, f"{name}: is not in the list of arrays"
            elif digests and name not in digests:
                yield 0, f"{name}: was not saved, as there is no digest of it"
            else:
                try:
                    leaf = self[name]
                    yield leaf.nbytes, _wrong(name, leaf, wanted.get(name), digests.get(name))
                except DamagedCheckpoint as damage:
                    yield 0, damage.reasons[0]


def _wrong(name: str, leaf: StoredArray, wanted: list[Any] | None, saved_as: str | None) -> str:
    if wanted and leaf.described != wanted:
        return f"{name}: {leaf.described}, saved as {wanted}"
    found = leaf.digest()
    return "" if saved_as in (None, found) else f"{name}: digest {found}, saved as {saved_as}"


@contextlib.contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """Raises DamagedCheckpoint for any error: TensorStore has no class of its own."""
    try:
        yield
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0][:300]
        raise DamagedCheckpoint(path, [f"{what}: cannot be read: {said}"]) from error
