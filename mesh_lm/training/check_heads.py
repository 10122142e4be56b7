"""Checks whether each device's query heads share complete kv heads, in the layers of every
segment.
"""

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
    rows_of = {
        segment.name: (
            rules.row("activations", f"{segment.name}/heads"),
            rules.row("activations", f"{segment.name}/kv_heads"),
        )
        for segment in model.stack().segments
    }
    names_of: dict[tuple[str, str], list[str]] = {}
    for name, (heads_row, kv_row) in rows_of.items():
        if heads_row is not None and kv_row is not None:
            names_of.setdefault((heads_row, kv_row), []).append(name)
    for (heads_row, kv_row), names in names_of.items():
        # Rows of the model that hold for every segment are reported without a segment, others with
        # the first that they hold for.
        of_the_model = len(names) == len(rows_of) and "/" not in heads_row + kv_row
        where = "" if of_the_model else f" of segment {names[0]!r}"
        yield from _problems_of_rows(config, model, where, heads_row, kv_row)


def _problems_of_rows(
    config: TrainConfig, model: DecoderConfig, where: str, heads_row: str, kv_row: str
) -> Iterator[str]:
    """The same of the two rows by which query and kv heads are sharded; `where` names the segment,
    where it must.
    """
    activations, mesh = config.rules.activations, config.mesh.sizes()
    heads_entry, kv_entry = activations[heads_row], activations[kv_row]
    heads_by, kv_by = (
        tuple(axis for axis in axes_of(entry) if mesh.get(axis, 1) > 1)
        for entry in (heads_entry, kv_entry)
    )
    if heads_by[: len(kv_by)] != kv_by:
        fix = f"set both to the same mesh axes, or {kv_row!r} to None"
        yield (
            f"rules.activations[{kv_row!r}]={kv_entry!r}: the query heads{where} must be sharded "
            f"over these axes first, and rules.activations[{heads_row!r}]={heads_entry!r}; {fix}"
        )
        return
    ways = math.prod(mesh[axis] for axis in heads_by)
    if model.n_heads % ways or math.prod(mesh[axis] for axis in kv_by) == ways:
        # `_sizes` reports heads that do not divide; those that are sharded alike share complete kv
        # heads
        return
    group, local = model.n_heads // model.kv_heads, model.n_heads // ways
    if local % group and group % local:
        yield (
            f"rules.activations[{heads_row!r}]={heads_entry!r}: {local} query heads{where} on each "
            f"device do not share complete kv heads, of which each serves {group}; set "
            f"{heads_row!r} to fewer ways, or to None"
        )
