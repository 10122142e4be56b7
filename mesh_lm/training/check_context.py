"""Checks whether attention can exchange its keys or heads over the mesh axes that shard
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.model.context import repeats
from sharding_rules import AXES, ISLAND, axes_of, setting


def context_problems(config: TrainConfig) -> Iterator[str]:
    """Sequences that cannot be sharded as the rules say, and attention that cannot exchange its
    keys or heads so.
    """
    rules, mesh, model = config.rules, config.mesh.sizes(), config.model
    entry, rest = (rules.activations.get(row) for row in ("seq", "seq_resid"))
    for axis, exchange in rules.context.items():
        if axis not in rules.manual_axes() - {ISLAND, "pipeline", "data"}:
            fix = "use 'sequence'" + (
                "" if axis in AXES else f", or declare it: rules.axes[{axis!r}]='manual'"
            )
            yield (
                f"rules.context[{axis!r}]={exchange!r}: the mesh axis {axis!r} cannot shard "
                f"sequences; {fix}"
            )
        elif axis not in axes_of(entry):
            yield (
                f"rules.context[{axis!r}]={exchange!r}, but rules.activations['seq']={entry!r} is "
                f"not sharded over {axis!r}; add it there"
            )
        elif axis not in axes_of(rest):
            fix = f"add {axis!r} in front"
            yield (
                f"rules.activations['seq_resid']={rest!r}: the residual stream is sharded like "
                f"attention's input, over {entry!r}; {fix}"
            )
            break
    else:
        if rules.context and (first := axes_of(rest)[: len(axes_of(entry))]) != axes_of(entry):
            fix = (
                f"begin with {entry!r}, over which attention's input is sharded, not with {first!r}"
            )
            yield f"rules.activations['seq_resid']={rest!r}: {fix}"
    used = [
        (axis, rules.context[axis])
        for axis in axes_of(entry)
        if mesh.get(axis, 1) > 1 and axis in rules.context
    ]
    inner = [axis for axis, exchange in used if exchange == "ulysses"]
    if len(used) - len(inner) > 1 or used[len(used) - len(inner) :] != [
        (axis, "ulysses") for axis in inner
    ]:
        by = ", ".join(f"{axis} by {exchange}" for axis, exchange in used)
        yield (
            f"rules.activations['seq']={entry!r}: {by}; it can be one axis by gather or ring, then "
            "others by ulysses"
        )
        return
    ways, chunks = (
        math.prod(mesh[axis] for axis, _ in used),
        2 * math.prod(mesh[axis] for axis, _ in used if axis not in inner),
    )
    if (
        chunks > 2
        and model.seq_len % ways == 0
        and model.seq_len % (least := math.lcm(ways, chunks))
    ):
        product = " x ".join(setting(axis, mesh[axis]) for axis, _ in used)
        below = model.seq_len // least * least
        fits = f"{below} or {below + least}" if below else str(least)
        yield (
            f"model.seq_len={model.seq_len} is not divisible by {least}: shards over {product} "
            f"have two chunks each; it can be {fits}"
        )
    if inner and not config.model.problems() and "heads" in config.model.sizes():
        names_of: dict[tuple[int, int], list[str]] = {}
        segments = config.model.stack().names or ("",)
        for name in segments:
            scope = f"{name}/" if name else ""
            ways_of_heads = _ways(config, f"{scope}heads"), _ways(config, f"{scope}kv_heads")
            names_of.setdefault(ways_of_heads, []).append(name)
        for (by_tensor, by_kv), names in names_of.items():
            where = "" if len(names) == len(segments) else f" of segment {names[0]!r}"
            yield from _ulysses(config, inner, by_tensor, by_kv, where)


def _ways(config: TrainConfig, logical: str) -> int:
    """The number of shards of an activation's axis."""
    rules, mesh = config.rules, config.mesh.sizes()
    row = rules.row("activations", logical)
    return math.prod(mesh.get(axis, 1) for axis in axes_of(rules.activations[row] if row else None))


def _ulysses(
    config: TrainConfig, axes: list[str], by_tensor: int, by_kv: int, where: str
) -> Iterator[str]:
    """Numbers of heads that Ulysses cannot divide over its mesh axes.

    by_tensor, by_kv: shards that the rules make of query and kv heads; `where` names the segment in
    which they do, where it must.
    """
    mesh, sizes = config.mesh.sizes(), config.model.sizes()
    (field, heads), (_, kv_heads) = sizes["heads"], sizes.get("kv_heads", sizes["heads"])
    local, ways = heads // by_tensor, math.prod(mesh[axis] for axis in axes)
    product = " x ".join(setting(axis, mesh[axis]) for axis in axes)
    if heads % by_tensor or kv_heads % by_kv:
        return  # `_sizes` reports it
    own_kv = kv_heads // by_kv if by_kv > 1 or by_tensor == 1 else max(1, local * kv_heads // heads)
    if local % ways or (local // own_kv) % repeats(own_kv, ways):
        fits = [
            n
            for n in range(1, local + 1)
            if local % n == 0 and (local // own_kv) % repeats(own_kv, n) == 0
        ]
        on = f", {local}{where} on each device" if by_tensor > 1 else where
        what = _size_field(axes[0]) if len(axes) == 1 else "their product"
        fix = f"{what} can be {', '.join(map(str, fits))}"
        kv = f" with {kv_heads} kv heads" if kv_heads != heads else ""
        other = "or exchange by gather or ring, which divide no heads"
        yield (
            f"model.{field}={heads}{kv}{on}: Ulysses cannot divide them over {product}; {fix}, "
            f"{other}"
        )


def _size_field(axis: str) -> str:
    """The config field that has the size of a mesh axis."""
    return setting(axis, 0).removesuffix("=0")
