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

_CHUNK = 1 << 18
"""Elements that NumPy compares at a time."""

Box = tuple[slice, ...]


class StoredArray:
    """One array on disk. Reading it raises DamagedCheckpoint if that fails."""

    def __init__(self, path: Path, name: str, store: ts.TensorStore) -> None:
        self._path = path
        self._name = name
        self._store = store
        self.shape = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype
        chunk_shape = store.chunk_layout.read_chunk.shape or ()
        self.part = tuple(
            chunk or size for chunk, size in zip(chunk_shape, self.shape, strict=False)
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
        slices_by_axis = [
            [slice(start, min(start + step, size)) for start in range(0, size, step)]
            for size, step in zip(self.shape, self.part, strict=True)
        ]
        return itertools.product(*slices_by_axis)

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
        n_changed = 0
        largest = 0.0
        for box in grid.boxes():
            part = self[box].reshape(-1)
            other_part = other[box].reshape(-1)
            for start in range(0, part.size, _CHUNK):
                a = part[start : start + _CHUNK]
                b = other_part[start : start + _CHUNK]
                changed = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(axis=1)
                if changed.any():
                    n_changed += int(changed.sum())
                    gaps = np.abs(a[changed].astype(np.float64) - b[changed].astype(np.float64))
                    largest = float(np.maximum(largest, gaps.max()))  # unlike max(), keeps NaN
        return n_changed, largest


class StoredArrays:
    """The arrays of one checkpoint by name, such as "params/blocks.mlp.up.weight".

    Opening it reads only their index.
    """

    def __init__(self, path: Path) -> None:
        """path: a checkpoint, renamed or not.

        Raises DamagedCheckpoint if the index or the list of arrays cannot be read.
        """
        self.path = path
        self._store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path / 'state'}/"}}
        # For the index, not for arrays.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})
        self._names: dict[str, str] = {}  # as in digests -> in the store
        with _readable(path, "the list of its arrays"):
            content = strict_json.read(path / "state" / "_METADATA", size=strict_json.LARGE_FILE)
            for leaf in content["tree_metadata"].values():
                keys = [str(key["key"]) for key in leaf["key_metadata"]]
                self._names["/".join(keys)] = ".".join(keys)
            store = ts.KvStore.open(self._store, context=self._context).result()
            files = store.list().result()
        self._stored = {
            file.decode().removesuffix("/zarr.json")
            for file in files
            if file.endswith(b"/zarr.json")
        }

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> StoredArray:
        """Returns an array.

        Raises DamagedCheckpoint if its description is missing or unreadable.
        """
        if self._names[name] not in self._stored:
            raise DamagedCheckpoint(self.path, [f"{name}: is missing"])
        kvstore = self._store | {"path": f"{self._names[name]}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore}
        with _readable(self.path, name):
            store = ts.open(spec, context=self._context, open=True, read=True).result()
            return StoredArray(self.path, name, store)

    def verified(self, metadata: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Yields (bytes, problem or "") for every array that is stored or that `metadata`
        describes.
        """
        digests = metadata.get("digests", {})
        shapes: dict[str, list[Any]] = {}
        for part, leaves in parts_of(metadata).items():
            for name, shape in leaves.items():
                shapes[f"{part}/{name}"] = shape
        for name in dict.fromkeys([*self, *digests, *shapes]):
            if name not in self._names:
                yield 0, f"{name}: is not in the list of arrays"
            elif digests and name not in digests:
                yield 0, f"{name}: was not saved: it has no digest"
            else:
                try:
                    array = self[name]
                    problem = _problem(name, array, shapes.get(name), digests.get(name))
                    # Descriptions of earlier versions have no step.
                    if name == "step" and not problem and "step" not in metadata:
                        problem = self._misnamed(int(array[()]))
                    yield array.nbytes, problem
                except DamagedCheckpoint as damage:
                    yield 0, damage.reasons[0]

    def _misnamed(self, step: int) -> str:
        number = self.path.name.partition(".")[0]
        return misnamed(step) if number.isdecimal() and int(number) != step else ""


def _problem(
    name: str, array: StoredArray, shape: list[Any] | None, saved_digest: str | None
) -> str:
    if shape and array.described != shape:
        return f"{name}: {array.described}, saved as {shape}"
    digest = array.digest()
    if saved_digest in (None, digest):
        return ""
    return f"{name}: digest {digest}, saved as {saved_digest}"


@contextlib.contextmanager
def _readable(path: Path, subject: str) -> Iterator[None]:
    """Turns any error into DamagedCheckpoint, because TensorStore has no error class of its own."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0][:300]
        raise DamagedCheckpoint(path, [f"{subject}: cannot be read: {reason}"]) from error
