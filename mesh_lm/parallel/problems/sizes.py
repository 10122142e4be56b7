"""Sizes of the model and of the batch that do not divide over the mesh axes that shard them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.problems.rows import name_of
from sharding_rules import axes_of, row_of, setting
from sharding_rules.rules import Column, Kind


def field_of(axis: str) -> str:
    """Returns the config field that has the size of a mesh axis."""
    return setting(axis, 0).removesuffix("=0")


def size_problems(config: TrainConfig) -> Iterator[str]:
    """Yields sizes of the model that do not divide."""
    mesh = config.mesh.sizes()
    reported = set()
    for kind in ("params", "activations", "gradients", "optimizer"):
        column = config.rules.column(kind)
        for row, field, size in _rows_with_sizes(column, config.model.sizes()):
            axes = tuple(axis for axis in axes_of(column[row]) if mesh.get(axis, 1) > 1)
            n_shards = math.prod(mesh[axis] for axis in axes)
            if size % n_shards == 0 or (field, axes) in reported:
                continue
            reported.add((field, axes))
            product = " x ".join(setting(axis, mesh[axis]) for axis in axes)
            fix = f"their product must divide {size}"
            if len(axes) == 1:
                fix = f"{field_of(axes[0])} can be {_first_few(_divisors(size))}"
            yield (
                f"model.{field}={size} is not divisible by its number of shards, {product} "
                f"(rules.{kind}: {row} -> {'+'.join(axes)}); {fix}"
                f"{_kv_head_fix(config, kind, row, n_shards)}"
            )


def _rows_with_sizes(
    column: Column, sizes: dict[str, tuple[str, int]]
) -> Iterator[tuple[str, str, int]]:
    """Yields (row, field, size) for each row, scoped or not, of a logical axis whose size is
    known.
    """
    for logical in dict.fromkeys([*sizes, *column]):
        field_and_size = sizes.get(logical, sizes.get(name_of(logical)))
        row = row_of(column, logical)
        if field_and_size and row:
            yield row, *field_and_size


def _kv_head_fix(config: TrainConfig, kind: Kind, row: str, n_shards: int) -> str:
    """Returns the other fix if kv heads do not divide: each device has all of them, or those of the
    first mesh axes, and uses those of its query heads. Empty if it would not work.
    """
    sizes = config.model.sizes()
    _, heads = sizes.get("heads", ("", 0))
    _, kv_heads = sizes.get("kv_heads", ("", 0))
    if name_of(row) != "kv_heads" or not kv_heads or heads % kv_heads or heads % n_shards:
        return ""
    group = heads // kv_heads
    local_heads = heads // n_shards
    if local_heads % group and group % local_heads:
        return ""
    *first_axes, _ = axes_of(config.rules.column(kind)[row])
    n_first = math.prod(config.mesh.sizes().get(axis, 1) for axis in first_axes)
    if kind == "activations" and first_axes and kv_heads % n_first == 0:
        entry = first_axes[0] if len(first_axes) == 1 else tuple(first_axes)
        return (
            f"; or set rules.activations[{row!r}] to {entry!r}: {kv_heads // n_first} on each "
            "device"
        )
    columns = []
    for other in get_args(Kind):
        is_given = getattr(config.rules, other) is not None
        if is_given and axes_of(config.rules.column(other).get(row)):
            columns.append(f"rules.{other}")
    return f"; or set {row} to None in {' and '.join(columns)}: each device then has all kv heads"


def batch_problems(config: TrainConfig) -> Iterator[str]:
    """Yields a global batch that does not divide."""
    train = config.train
    if train.microbatches <= 0:
        return
    mesh = config.mesh.sizes()
    batch_axes = axes_of(config.rules.activations.get("batch"))
    factors = {axis: mesh[axis] for axis in batch_axes if mesh.get(axis, 1) > 1}
    unit = train.microbatches * math.prod(factors.values())
    if train.global_batch % unit == 0:
        return
    words = [f"train.microbatches={train.microbatches}"]
    words += [setting(axis, size) for axis, size in factors.items()]
    yield (
        f"train.global_batch={train.global_batch} is not divisible by {' x '.join(words)}"
        f"; the global batch can be {nearest_multiples(train.global_batch, unit)}"
    )


def nearest_multiples(n: int, unit: int) -> str:
    """Returns the multiples of a unit below and above n, as "96 or 128"."""
    below = n // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _first_few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
