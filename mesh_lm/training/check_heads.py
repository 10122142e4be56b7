"""Checks whether each device's query heads share complete kv heads, in the layers of every segment."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig
from sharding_rules import axes_of


def head_problems(config: TrainConfig) -> Iterator[str]:
    """Rows of kv heads that do not go with those of query heads (`mesh_lm.model.attention`)."""
    rules, model = config.rules, config.model
    if not isinstance(model, DecoderConfig) or model.problems() or model.stack().problems():
        return
    reported: set[tuple[str, str]] = set()
    for segment in model.stack().segments:
        heads_row = rules.row("activations", f"{segment.name}/heads")
        kv_row = rules.row("activations", f"{segment.name}/kv_heads")
        if heads_row is None or kv_row is None or (heads_row, kv_row) in reported:
            continue
        reported.add((heads_row, kv_row))
        yield from _segment_problems(config, model, segment.name, heads_row, kv_row)


def _segment_problems(config: TrainConfig, model: DecoderConfig, segment: str, heads_row: str, kv_row: str) -> Iterator[str]:
    """The same of one segment and its two rows, by which both are sharded."""
    activations, mesh = config.rules.activations, config.mesh.sizes()
    heads_entry, kv_entry = activations[heads_row], activations[kv_row]
    heads_by, kv_by = (tuple(axis for axis in axes_of(entry) if mesh.get(axis, 1) > 1) for entry in (heads_entry, kv_entry))
    where = f" of segment {segment!r}" if "/" in heads_row + kv_row else ""
    if heads_by[: len(kv_by)] != kv_by:
        fix = f"set both to the same mesh axes, or {kv_row!r} to None"
        yield (
            f"rules.activations[{kv_row!r}]={kv_entry!r}: the query heads{where} are not sharded so first, by "
            f"rules.activations[{heads_row!r}]={heads_entry!r}; {fix}"
        )
        return
    ways = math.prod(mesh[axis] for axis in heads_by)
    if model.n_heads % ways or math.prod(mesh[axis] for axis in kv_by) == ways:
        return  # `_sizes` reports heads that do not divide; those that are sharded alike share complete kv heads
    group, local = model.n_heads // model.kv_heads, model.n_heads // ways
    if local % group and group % local:
        yield (
            f"rules.activations[{heads_row!r}]={heads_entry!r}: {local} query heads{where} on each device do not share complete kv heads, "
            f"of which each serves {group}; set {heads_row!r} to fewer ways, or to None"
        )
