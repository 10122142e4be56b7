"""Loads sharded batches onto the devices. The only file that imports `grain`.

Legend: M microbatches, B sequences in a microbatch (global_batch // M), S sequence length, R rows
of the batch that this process holds.

Row (m, b) of a batch that starts at global sample position p holds sample p + m B + b, whatever the
mesh and the number of processes. A process reads the rows that its own devices hold, according to
the sharding: several processes may hold the same rows (pipeline, tensor and sequence axes), so the
process index is not used. Grain prefetches in threads; none of its state is saved, because the
position suffices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.data.rows import RowReader
from mesh_lm.errors import ConfigError

Batch = dict[str, jax.Array]

MODULUS = 2**64
"""Certificates are sums modulo this."""


class Loader:
    """An endless iterator of (position after the batch, batch) that starts at a global sample
    position.

    Attributes:
      certificate: the sum, modulo 2^64, of BLAKE2b(position, tokens) over all returned samples of
      which this process is the first holder.
        Its sum over all processes is the same on any mesh: it proves that a run resumed elsewhere
        has read the same samples.

    A batch has the leaves of `RowReader.rows` as global arrays: [M, B, S] with `sharding`, and
    sample_ids [M, B] with its spec's first two entries. It also has indices, int32 [M, 1, S] with
    the last entry, which number the tokens of a sequence. Tokens are in the order that
    `sharding_rules.token_order` returns. When a batch is returned, the next one is already being
    transferred to the devices.

    Args:
      rows: the training split. global_batch: sequences in a batch, M x B. microbatches: M.
      sharding: of a [M, B, S] leaf. token_order: the index of each token, int32 [S], in the order
      in memory; None: in their own order. position: samples consumed so far. threads: Grain's
      reader threads; 0: read in the calling thread. prefetch: batches that the threads read ahead.

    Raises:
      ConfigError: the corpus has fewer sequences than a batch, M does not divide the batch, or the
      sharding does not divide [M, B, S].
    """

    def __init__(
        self,
        rows: RowReader,
        *,
        global_batch: int,
        microbatches: int,
        sharding: NamedSharding,
        token_order: np.ndarray | None = None,
        position: int,
        threads: int,
        prefetch: int,
    ) -> None:
        rows.require(global_batch)
        self._layout = _Layout.of(global_batch, microbatches, rows.seq_len, sharding, token_order)
        self._position, self._global_batch = position, global_batch
        self._batches = _read(
            _Source(rows, self._layout, position, sys.maxsize, certified=True), threads, prefetch
        )
        self._ahead: tuple[int, Batch] | None = None
        self.certificate = 0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[int, Batch]:
        share, batch = self._ahead or self._next()
        self._ahead = self._next()
        self._position += self._global_batch
        self.certificate = (self.certificate + share) % MODULUS
        return self._position, batch

    def _next(self) -> tuple[int, Batch]:
        batch = next(self._batches)
        return int(batch.pop("certificate")), self._layout.to_devices(batch)

    def close(self) -> None:
        """Stops the reader threads."""
        self._batches.close()


def heldout(
    rows: RowReader,
    *,
    global_batch: int,
    microbatches: int,
    sharding: NamedSharding,
    token_order: np.ndarray | None = None,
    threads: int,
    prefetch: int,
    limit: int = 0,
) -> Iterator[Batch]:
    """Yields one pass over `limit` evenly spaced sequences (0: all), in batches like those of
    `Loader`.

    The last batch is padded with repeats of the last sequence at weight 0, so that all batches have
    the same shape. Raises as `Loader`, but accepts any number of sequences.
    """
    layout = _Layout.of(global_batch, microbatches, rows.seq_len, sharding, token_order)
    stop = min(limit or len(rows), len(rows))
    with contextlib.closing(
        _read(_Source(rows, layout, 0, stop, len(rows)), threads, prefetch)
    ) as batches:
        for batch in batches:
            yield layout.to_devices(batch)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Which rows of a [M, B, S] batch this process's devices hold, and how to place them there."""

    shape: tuple[int, int, int]
    sharding: NamedSharding
    rows: np.ndarray
    """m B + b of each row held by this process, int64 [R], ascending."""
    row_index: np.ndarray
    """Index of row (m, b) in `rows`, int64 [M, B]; -1 if this process does not hold it."""
    first: np.ndarray
    """Whether no process with a lower index holds the row as well, bool [R]."""
    token_order: np.ndarray | None
    """As for `Loader`."""

    @classmethod
    def of(
        cls,
        global_batch: int,
        microbatches: int,
        seq_len: int,
        sharding: NamedSharding,
        token_order: np.ndarray | None,
    ) -> _Layout:
        if global_batch % microbatches:
            raise ConfigError(
                f"train.global_batch={global_batch} must be a multiple of "
                f"train.microbatches={microbatches}"
            )
        shape = (microbatches, global_batch // microbatches, seq_len)
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise ConfigError(
                f"a batch of (microbatches, sequences, tokens) = {shape} does not divide: {error}"
            ) from error
        is_here, holder = np.zeros(shape[:2], bool), np.full(shape[:2], sys.maxsize)
        for device, index in sharding.devices_indices_map(shape).items():
            held = (index or ())[:2]
            is_here[held] |= device.process_index == jax.process_index()
            holder[held] = np.minimum(holder[held], device.process_index)
        row_index = np.where(is_here, np.cumsum(is_here).reshape(is_here.shape) - 1, -1)
        return cls(
            shape,
            sharding,
            np.flatnonzero(is_here),
            row_index,
            holder[is_here] == jax.process_index(),
            token_order,
        )

    def to_devices(self, batch: dict[str, np.ndarray]) -> Batch:
        """Returns global arrays [M, B, ...] from this process's rows [R, ...], plus token indices;
        devices do not communicate.
        """
        return {
            "indices": self._indices,
            **{name: self._to_device(leaf) for name, leaf in batch.items()},
        }

    @functools.cached_property
    def _indices(self) -> jax.Array:
        """The position of each token in its sequence, int32 [M, 1, S]."""
        M, _, S = self.shape
        spec = self.sharding.spec[2:]
        sharding = NamedSharding(self.sharding.mesh, PartitionSpec(None, None, *spec))
        order = np.arange(S, dtype=np.int32) if self.token_order is None else self.token_order
        positions = np.broadcast_to(order, (M, 1, S))
        return jax.make_array_from_callback(
            positions.shape, sharding, lambda index: positions[index]
        )

    def _to_device(self, leaf: np.ndarray) -> jax.Array:
        def held(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            return leaf[(self.row_index[index[:2]], *index[2:])]

        shape = self.shape[: leaf.ndim + 1]
        sharding = NamedSharding(
            self.sharding.mesh, PartitionSpec(*self.sharding.spec[: len(shape)])
        )
        return jax.make_array_from_callback(shape, sharding, held)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The Grain source whose element `index` is this process's rows of batch `index`, as
    `RowReader.rows` [R, ...].
    """

    rows: RowReader
    layout: _Layout
    start: int
    """The first global sample position."""
    stop: int
    """Positions from here on repeat the last sample, at weight 0."""
    spread: int = 0
    """If not 0, positions 0 to stop are spread evenly over this many sequences."""
    certified: bool = False
    """Whether an element includes its share of the certificate, uint64 []."""

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self._global_batch)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        indices = self.start + index * self._global_batch + self.layout.rows
        taken = np.minimum(indices, self.stop - 1)
        batch = self.rows.rows(taken * self.spread // self.stop if self.spread else taken)
        batch["weights"][indices >= self.stop] = 0.0
        certificate = (
            {"certificate": self._certificate(indices, batch["tokens"])} if self.certified else {}
        )
        if (order := self.layout.token_order) is not None:
            batch = {
                name: leaf[:, order] if leaf.ndim == 2 else leaf for name, leaf in batch.items()
            }
        return batch | certificate

    def _certificate(self, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns this process's share, uint64 []; computed in the reader thread, because a large
        batch takes milliseconds.
        """
        total = 0
        for position, row in zip(
            positions[self.layout.first], tokens[self.layout.first], strict=True
        ):
            sample_hash = hashlib.blake2b(int(position).to_bytes(8, "little"), digest_size=8)
            sample_hash.update(row.tobytes())
            total += int.from_bytes(sample_hash.digest(), "little")
        return np.asarray(total % MODULUS, np.uint64)

    @property
    def _global_batch(self) -> int:
        return self.layout.shape[0] * self.layout.shape[1]


def _read(
    source: _Source, threads: int, prefetch: int
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """Returns an iterator over the source's elements in order, prefetched by threads."""
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))
