"""Sequences that cannot be sharded as the rules say (context parallelism), and attention that
cannot exchange its keys or heads so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.model.context import repeats
from mesh_lm.parallel.problems.sizes import field_of, nearest_multiples
from sharding_rules import AXES, ISLAND, axes_of, setting


def context_problems(config: TrainConfig) -> Iterator[str]:
    """Yields contradictions of `rules.context` with the rows of sequences, and sizes that do not
    divide.
    """
    yield from _row_problems(config)
    rules = config.rules
    mesh = config.mesh.sizes()
    entry = rules.activations.get("seq")
    axes = [axis for axis in axes_of(entry) if mesh.get(axis, 1) > 1 and axis in rules.context]
    ulysses_axes = [axis for axis in axes if rules.context[axis] == "ulysses"]
    chunked_axes = [axis for axis in axes if axis not in ulysses_axes]
    if len(chunked_axes) > 1 or axes != chunked_axes + ulysses_axes:
        exchanges = ", ".join(f"{axis} by {rules.context[axis]}" for axis in axes)
        yield (
            f"rules.activations['seq']={entry!r}: {exchanges}; it can be one axis by gather or "
            "ring, then others by ulysses"
        )
        return
    yield from _length_problems(config, axes, chunked_axes)
    if ulysses_axes and not config.model.problems() and "heads" in config.model.sizes():
        yield from _ulysses_problems(config, ulysses_axes)


def _row_problems(config: TrainConfig) -> Iterator[str]:
    rules = config.rules
    entry = rules.activations.get("seq")
    residual_entry = rules.activations.get("seq_resid")
    for axis, exchange in rules.context.items():
        if axis not in rules.manual_axes() - {ISLAND, "pipeline", "data"}:
            fix = "use 'sequence'"
            if axis not in AXES:
                fix += f", or declare it: rules.axes[{axis!r}]='manual'"
            yield (
                f"rules.context[{axis!r}]={exchange!r}: the mesh axis {axis!r}"
                f" cannot shard sequences; {fix}"
            )
        elif axis not in axes_of(entry):
            yield (
                f"rules.context[{axis!r}]={exchange!r}, but rules.activations['seq']={entry!r} is "
                f"not sharded over {axis!r}; add it there"
            )
        elif axis not in axes_of(residual_entry):
            yield (
                f"rules.activations['seq_resid']={residual_entry!r}: the residual stream is "
                f"sharded like attention's input, over {entry!r}; add {axis!r} in front"
            )
            return
    if not rules.context:
        return
    first_axes = axes_of(residual_entry)[: len(axes_of(entry))]
    if first_axes != axes_of(entry):
        yield (
            f"rules.activations['seq_resid']={residual_entry!r}: begin with {entry!r}, over which "
            f"attention's input is sharded, not with {first_axes!r}"
        )


def _length_problems(
    config: TrainConfig, axes: list[str], chunked_axes: list[str]
) -> Iterator[str]:
    """Yields a length that does not divide into two chunks for each shard by gather or ring."""
    if not chunked_axes:
        return
    mesh = config.mesh.sizes()
    seq_len = config.model.seq_len
    n_shards = math.prod(mesh[axis] for axis in axes)
    n_chunks = 2 * math.prod(mesh[axis] for axis in chunked_axes)
    unit = math.lcm(n_shards, n_chunks)
    # `size_problems` reports lengths that do not divide by the shards.
    if seq_len % n_shards == 0 and seq_len % unit:
        product = " x ".join(setting(axis, mesh[axis]) for axis in axes)
        yield (
            f"model.seq_len={seq_len} is not divisible by {unit}: shards over {product}"
            f" have two chunks each; it can be {nearest_multiples(seq_len, unit)}"
        )


def _ulysses_problems(config: TrainConfig, axes: list[str]) -> Iterator[str]:
    """Yields numbers of heads that Ulysses cannot divide over its mesh axes, once for all segments
    whose heads the rules shard alike.
    """
    segments = config.model.stack().names or ("",)
    segments_by_shards: dict[tuple[int, int], list[str]] = {}
    for name in segments:
        scope = f"{name}/" if name else ""
        shards = _n_shards(config, f"{scope}heads"), _n_shards(config, f"{scope}kv_heads")
        segments_by_shards.setdefault(shards, []).append(name)
    for (head_shards, kv_shards), names in segments_by_shards.items():
        segment = "" if len(names) == len(segments) else f" of segment {names[0]!r}"
        yield from _head_problems(config, axes, head_shards, kv_shards, segment)


def _n_shards(config: TrainConfig, logical: str) -> int:
    """Returns the number of shards of an activation's axis."""
    row = config.rules.row("activations", logical)
    entry = config.rules.activations[row] if row else None
    mesh = config.mesh.sizes()
    return math.prod(mesh.get(axis, 1) for axis in axes_of(entry))


def _head_problems(
    config: TrainConfig, axes: list[str], head_shards: int, kv_shards: int, segment: str
) -> Iterator[str]:
    """Yields heads that Ulysses cannot divide.

    head_shards, kv_shards: shards that the rules make of query and kv heads. segment: words that
    name the segment in which they do, where they must.
    """
    sizes = config.model.sizes()
    field, heads = sizes["heads"]
    _, kv_heads = sizes.get("kv_heads", sizes["heads"])
    if heads % head_shards or kv_heads % kv_shards:
        return  # `size_problems` reports it
    mesh = config.mesh.sizes()
    n_ways = math.prod(mesh[axis] for axis in axes)
    local_heads = heads // head_shards
    local_kv_heads = kv_heads // kv_shards
    if kv_shards == 1 and head_shards > 1:
        # Replicated kv heads: each device takes those of its query heads.
        local_kv_heads = max(1, local_heads * kv_heads // heads)
    group = local_heads // local_kv_heads

    def divides(n: int) -> bool:
        return local_heads % n == 0 and group % repeats(local_kv_heads, n) == 0

    if divides(n_ways):
        return
    product = " x ".join(setting(axis, mesh[axis]) for axis in axes)
    fitting = ", ".join(str(n) for n in range(1, local_heads + 1) if divides(n))
    subject = field_of(axes[0]) if len(axes) == 1 else "their product"
    kv_text = f" with {kv_heads} kv heads" if kv_heads != heads else ""
    on_device = f", {local_heads}{segment} on each device" if head_shards > 1 else segment
    yield (
        f"model.{field}={heads}{kv_text}{on_device}: Ulysses cannot divide them over {product}; "
        f"{subject} can be {fitting}, or exchange by gather or ring, which divide no heads"
    )
