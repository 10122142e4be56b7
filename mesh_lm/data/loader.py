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

    A batch has the leaves of `RowReader.rows` as global arrays: [M, B, S] with `sharding`, and
    sample_ids [M, B] with its spec's first two entries. It also has indices, int32 [M, 1, S] with
    the last entry, which number the tokens of a sequence. Tokens are in the order that
    `sharding_rules.token_order` returns. When a batch is returned, the next one is already being
    transferred to the devices.

    Attributes:
      certificate: the sum, modulo 2^64, of BLAKE2b(position, tokens) over all returned samples of
        which this process is the first holder. Its sum over all processes is the same on any mesh:
        it proves that a run resumed elsewhere has read the same samples.

    Args:
      rows: the training split.
      global_batch: sequences in a batch, M x B.
      microbatches: M.
      sharding: of a [M, B, S] leaf.
      token_order: the index of each token, int32 [S], in the order in memory; None: in their own
        order.
      position: samples consumed so far.
      threads: Grain's reader threads; 0: read in the calling thread.
      prefetch: batches that the threads read ahead.

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
        self._position = position
        self._global_batch = global_batch
        source = _Source(rows, self._layout, position, sys.maxsize, certified=True)
        self._batches = _read(source, threads, prefetch)
        self._next: tuple[int, Batch] | None = None
        self.certificate = 0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[int, Batch]:
        certificate, batch = self._next or self._load()
        self._next = self._load()
        self._position += self._global_batch
        self.certificate = (self.certificate + certificate) % MODULUS
        return self._position, batch

    def _load(self) -> tuple[int, Batch]:
        """Returns the certificate of the next batch, and its arrays on their way to the devices."""
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
    the same shape. Raises the errors of `Loader`, but accepts any number of sequences.
    """
    layout = _Layout.of(global_batch, microbatches, rows.seq_len, sharding, token_order)
    stop = min(limit or len(rows), len(rows))
    source = _Source(rows, layout, 0, stop, spread=len(rows))
    with contextlib.closing(_read(source, threads, prefetch)) as batches:
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
    is_first_holder: np.ndarray
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
                f"train.global_batch={global_batch} "
                f"must be a multiple of train.microbatches={microbatches}"
            )
        shape = (microbatches, global_batch // microbatches, seq_len)
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise ConfigError(
                f"a batch of (microbatches, sequences, tokens) = {shape} does not divide: {error}"
            ) from error
        is_local = np.zeros(shape[:2], bool)
        first_holder = np.full(shape[:2], sys.maxsize)
        for device, index in sharding.devices_indices_map(shape).items():
            rows = (index or ())[:2]
            is_local[rows] |= device.process_index == jax.process_index()
            first_holder[rows] = np.minimum(first_holder[rows], device.process_index)
        row_numbers = np.cumsum(is_local).reshape(is_local.shape) - 1
        return cls(
            shape=shape,
            sharding=sharding,
            rows=np.flatnonzero(is_local),
            row_index=np.where(is_local, row_numbers, -1),
            is_first_holder=first_holder[is_local] == jax.process_index(),
            token_order=token_order,
        )

    def to_devices(self, batch: dict[str, np.ndarray]) -> Batch:
        """Returns global arrays [M, B, ...] from this process's rows [R, ...], plus token indices.

        Devices do not communicate.
        """
        arrays = {name: self._to_device(leaf) for name, leaf in batch.items()}
        return {"indices": self._indices, **arrays}

    @functools.cached_property
    def _indices(self) -> jax.Array:
        """The position of each token in its sequence, int32 [M, 1, S]."""
        M, _, S = self.shape
        spec = PartitionSpec(None, None, *self.sharding.spec[2:])
        sharding = NamedSharding(self.sharding.mesh, spec)
        order = np.arange(S, dtype=np.int32) if self.token_order is None else self.token_order
        positions = np.broadcast_to(order, (M, 1, S))
        return jax.make_array_from_callback(
            positions.shape, sharding, lambda index: positions[index]
        )

    def _to_device(self, leaf: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            return leaf[(self.row_index[index[:2]], *index[2:])]

        shape = self.shape[: leaf.ndim + 1]
        spec = PartitionSpec(*self.sharding.spec[: len(shape)])
        return jax.make_array_from_callback(shape, NamedSharding(self.sharding.mesh, spec), shard)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The Grain source of batches: its element i is this process's rows of batch i, as
    `RowReader.rows` returns them, [R, ...].
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
        positions = self.start + index * self._global_batch + self.layout.rows
        sequences = np.minimum(positions, self.stop - 1)
        if self.spread:
            sequences = sequences * self.spread // self.stop
        batch = self.rows.rows(sequences)
        batch["weights"][positions >= self.stop] = 0.0

        # The certificate is that of the tokens in their own order.
        tokens = batch["tokens"]
        order = self.layout.token_order
        if order is not None:
            for name, leaf in batch.items():
                if leaf.ndim == 2:
                    batch[name] = leaf[:, order]
        if self.certified:
            batch["certificate"] = self._certificate(positions, tokens)
        return batch

    def _certificate(self, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns this process's share, uint64 [].

        It is computed in the reader thread, because a large batch takes milliseconds.
        """
        total = 0
        is_first = self.layout.is_first_holder
        for position, row in zip(positions[is_first], tokens[is_first], strict=True):
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
