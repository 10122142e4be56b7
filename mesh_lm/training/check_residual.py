"""Checks whether the columns of the residual stream can be sharded as the rules say
(two-dimensional tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from sharding_rules import TABLES, axes_of, row_of


def residual_problems(config: TrainConfig) -> Iterator[str]:
    """Rows by which the stream is not sharded as the weights that read and write it, or in a way
    that XLA or tables cannot follow.
    """
    rules, used = config.rules, config.rules.column("gathered")
    entry, weights, tables = (
        rules.activations.get("embed"),
        used.get("embed"),
        used[row_of(used, f"{TABLES}/embed") or "embed"],
    )
    for row, scoped in rules.activations.items():
        if row.endswith("/embed") and axes_of(scoped) != axes_of(entry):
            yield (
                f"rules.activations[{row!r}]={scoped!r}: all layers have one residual stream; set "
                f"it to {entry!r}, as 'embed'"
            )
    if not entry or set(axes_of(entry)) & rules.manual_axes():
        return  # `_unsupported_rows` refuses manual axes
    where, instead = f"rules.activations['embed']={entry!r}", "or set it to None"
    if axes_of(weights) != axes_of(entry):
        made = (
            "the weights that read and write it have "
            f"rules.gathered['embed']={axes_of(weights) or None!r}"
        )
        yield (
            f"{where}: {made}; shard both over one axis that shards nothing else, as preset "
            f"megatron_2d does, {instead}"
        )
    if tables:
        fix = f"set rules.params['{TABLES}/embed'] to None, as preset megatron_2d does, {instead}"
        yield f"{where}: tables are used with full rows; {fix}"
    sequence = [
        axis
        for axis in axes_of(rules.activations.get("seq_resid"))
        if axis not in rules.manual_axes()
    ]
    if sequence:
        fix = (
            "use megatron_2d without megatron_sp"
            if entry == "tensor_y"
            else f"leave {sequence[0]!r} out of seq_resid"
        )
        yield (
            f"{where}: the residual stream's sequence is sharded, too, over {sequence[0]!r}, and "
            f"XLA would replicate it between; {fix}"
        )
