"""Columns of the residual stream that cannot be sharded as the rules say (two-dimensional tensor
parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from sharding_rules import TABLES, axes_of, row_of


def residual_problems(config: TrainConfig) -> Iterator[str]:
    """Yields rows by which the stream is not sharded as the weights that read and write it, or in a
    way that XLA or tables cannot follow.
    """
    rules = config.rules
    gathered = rules.column("gathered")
    entry = rules.activations.get("embed")
    for row, scoped_entry in rules.activations.items():
        if row.endswith("/embed") and axes_of(scoped_entry) != axes_of(entry):
            yield (
                f"rules.activations[{row!r}]={scoped_entry!r}: all layers have one residual "
                f"stream; set it to {entry!r}, as 'embed'"
            )
    if not entry or set(axes_of(entry)) & rules.manual_axes():
        return  # `row_problems` refuses manual axes
    setting = f"rules.activations['embed']={entry!r}"
    weight_axes = axes_of(gathered.get("embed"))
    if weight_axes != axes_of(entry):
        yield (
            f"{setting}: the weights that read and write it have "
            f"rules.gathered['embed']={weight_axes or None!r}; shard both over one axis that "
            "shards nothing else, as preset megatron_2d does, or set it to None"
        )
    if gathered[row_of(gathered, f"{TABLES}/embed") or "embed"]:
        yield (
            f"{setting}: tables are used with full rows; set rules.params['{TABLES}/embed'] to "
            "None, as preset megatron_2d does, or set it to None"
        )
    sequence_axes = axes_of(rules.activations.get("seq_resid"))
    auto_axes = [axis for axis in sequence_axes if axis not in rules.manual_axes()]
    if auto_axes:
        fix = f"leave {auto_axes[0]!r} out of seq_resid"
        if entry == "tensor_y":
            fix = "use megatron_2d without megatron_sp"
        yield (
            f"{setting}: the residual stream's sequence is sharded, too, over {auto_axes[0]!r}, "
            f"and XLA would replicate it between; {fix}"
        )
