"""Rows of kv heads that do not go with those of query heads (`mesh_lm.model.attention`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.model.config import DecoderConfig
from sharding_rules import axes_of


def head_problems(config: TrainConfig) -> Iterator[str]:
    """Yields rules by which the query heads of a device do not share complete kv heads, once for
    all segments with the same rows.
    """
    rules = config.rules
    model = config.model
    if not isinstance(model, DecoderConfig) or model.problems() or model.stack().problems():
        return
    segments = model.stack().segments
    segments_by_rows: dict[tuple[str, str], list[str]] = {}
    for segment in segments:
        heads_row = rules.row("activations", f"{segment.name}/heads")
        kv_row = rules.row("activations", f"{segment.name}/kv_heads")
        if heads_row is not None and kv_row is not None:
            segments_by_rows.setdefault((heads_row, kv_row), []).append(segment.name)
    for (heads_row, kv_row), names in segments_by_rows.items():
        # Rows of the model that hold for every segment are reported without a segment, others with
        # the first that they hold for.
        are_the_models = len(names) == len(segments) and "/" not in heads_row + kv_row
        segment_words = "" if are_the_models else f" of segment {names[0]!r}"
        yield from _row_problems(config, model, segment_words, heads_row, kv_row)


def _row_problems(
    config: TrainConfig, model: DecoderConfig, segment: str, heads_row: str, kv_row: str
) -> Iterator[str]:
    """Yields the problems of the two rows by which query and kv heads are sharded.

    segment: words that name the segment, where they must.
    """
    mesh = config.mesh.sizes()
    heads_entry = config.rules.activations[heads_row]
    kv_entry = config.rules.activations[kv_row]
    heads_axes = tuple(axis for axis in axes_of(heads_entry) if mesh.get(axis, 1) > 1)
    kv_axes = tuple(axis for axis in axes_of(kv_entry) if mesh.get(axis, 1) > 1)
    if heads_axes[: len(kv_axes)] != kv_axes:
        yield (
            f"rules.activations[{kv_row!r}]={kv_entry!r}: the query heads{segment} must be sharded "
            f"over these axes first, and rules.activations[{heads_row!r}]={heads_entry!r}; set "
            f"both to the same mesh axes, or {kv_row!r} to None"
        )
        return
    n_shards = math.prod(mesh[axis] for axis in heads_axes)
    if model.n_heads % n_shards:
        return  # `size_problems` reports it
    if math.prod(mesh[axis] for axis in kv_axes) == n_shards:
        return  # heads that are sharded alike share complete kv heads
    group = model.n_heads // model.kv_heads
    local_heads = model.n_heads // n_shards
    if local_heads % group and group % local_heads:
        yield (
            f"rules.activations[{heads_row!r}]={heads_entry!r}: {local_heads} query heads{segment} "
            f"on each device do not share complete kv heads, of which each serves {group}; set "
            f"{heads_row!r} to fewer ways, or to None"
        )
