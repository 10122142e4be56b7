"""Arguments that take more memory than they must: parameters, moments and tables that a device
holds more of than its share.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator

from sharding_rules.lab.lint_context import (
    LARGE_MEMORY,
    Finding,
    LintContext,
    customary,
    names_of,
    short,
)
from sharding_rules.lab.report import Argument, Location
from sharding_rules.rules import Kind, axes_of, row_of


def misplaced(context: LintContext) -> Iterator[Finding]:
    """Parameters and moments that the rules shard and the program does not; without rules, moments
    not sharded as their parameters.
    """
    found = {kind: each for kind in ("params", "moments") if (each := _misplaced(context, kind))}
    wasted = sum(
        a.bytes - a.bytes // context.ways(missing) for each in found.values() for a, missing in each
    )
    if not found or wasted < LARGE_MEMORY * context.report.peak_bytes:
        return
    every = [one for each in found.values() for one in each]
    axes = [axis for axis in context.report.mesh if any(axis in missing for _, missing in every)]
    slots = {
        "params": "parameters",
        "moments": f"moments ({' and '.join(_slots(a for a, _ in found.get('moments', [])))})",
    }
    columns = [f"rules.{'optimizer' if kind == 'moments' else kind}" for kind in found]
    says = (
        f"{' and '.join(columns)} shard{'s' * (len(found) == 1)} them"
        if context.rules
        else "their parameters are sharded"
    )
    text = (
        f"{' and '.join(slots[kind] for kind in found)} of {names_of(a for a, _ in every)} are "
        "replicated"
    )
    text += f" along {' and '.join(axes)}, along which "
    fix = (
        "place them where the rules say (Rules.sharding)"
        if context.rules
        else "give each the sharding of its parameter"
    )
    yield Finding("replicated", wasted, Location(), text + says, fix)


def misplaced_moments(context: LintContext) -> bool:
    """Whether an optimizer's state is not sharded as it should be."""
    return bool(_misplaced(context, "moments"))


def _misplaced(context: LintContext, kind: str) -> list[tuple[Argument, set[str]]]:
    """Arguments and the mesh axes along which they should be sharded and are not."""
    found = []
    for a in context.report.arguments:
        if a.kind == kind and (missing := (_expected(context, a, kind) or set()) - set(a.axes)):
            found.append((a, missing))
    return found


def _expected(context: LintContext, argument: Argument, kind: str) -> set[str] | None:
    """The mesh axes that it should be sharded along; None where nothing says so."""
    if context.rules and context.logical(argument):
        return context.promised(argument, "params" if kind == "params" else "optimizer")
    if context.rules is None and kind == "moments":
        own = [
            a for a in context.params if short(a) == short(argument) and a.shape == argument.shape
        ]
        return set(own[0].axes) if len(own) == 1 else None
    return None


def _slots(moments: Iterator[Argument]) -> list[str]:
    """The names of an optimizer's slots, as they stand in the arguments' paths: mu, nu."""
    keys = (
        [next(filter(None, each)) for each in re.findall(r"^(\w+)|\['([^']*)'\]|\.(\w+)", a.name)]
        for a in moments
    )
    return list(dict.fromkeys(words[-2] if len(words) > 1 else words[-1] for words in keys))[:3]


def could_shard(context: LintContext) -> Iterator[Finding]:
    """Parameters and moments that are replicated along an axis that shards others of their kind,
    where no rule says otherwise.
    """
    groups: dict[tuple[str, str], list[Argument]] = {}
    told = {a.name for kind in ("params", "moments") for a, _ in _misplaced(context, kind)}
    for kind in ("params", "moments"):
        held = [a for a in context.report.arguments if a.kind == kind]
        for axis in sorted({axis for a in held for axis in a.axes}):
            for a in held:
                if (
                    a.name not in told
                    and axis not in a.axes
                    and (row := _row_for(context, a, axis)) is not None
                ):
                    groups.setdefault((axis, row), []).append(a)
    for (axis, row), held in groups.items():
        n = context.report.mesh[axis]
        wasted = sum(a.bytes for a in held) * (n - 1) // n
        if wasted >= LARGE_MEMORY * context.report.peak_bytes:
            table = (
                f"rules.params[{row!r}] and rules.activations[{row!r}]"
                if row
                else "a row of rules.params"
            )
            is_or_are = "is" if len({short(a) for a in held}) == 1 else "are"
            text = (
                f"{names_of(held)} {is_or_are} replicated along {axis}, which shards others of "
                f"their kind {n} ways"
            )
            yield Finding(
                "replicated",
                wasted,
                Location(),
                text,
                f"put {axis!r} into {table}",
                "error" if row else "notice",
            )


def _row_for(context: LintContext, a: Argument, axis: str) -> str | None:
    """The row that could shard it along `axis`; "" where dimensions have no names, and one is wide
    enough; None: there is none.
    """
    logical = context.logical(a)
    n = context.report.mesh[axis]
    if not logical:
        # What is outside of the layers (embedding, head) is replicated over the stages.
        enough = any(d % n == 0 and d >= 1024 * n for d in a.shape)
        return "" if axis != context.vocabulary.pipeline_axis and enough else None
    kind: Kind = "params" if a.kind == "params" else "optimizer"
    column = context.rules.column(kind) if context.rules else {}
    usual = customary("params") | (customary("optimizer") if a.kind == "moments" else set())
    for name, size in zip(logical, a.shape, strict=False):
        entry = axes_of(column[row] if name and (row := row_of(column, name)) else None)
        if name and (name, axis) in usual and size % (n * context.ways(set(entry) - {axis})) == 0:
            return name
    return None


def used_in_part(context: LintContext) -> Iterator[Finding]:
    """Arguments that every device holds whole, and of which each uses only its own slice."""
    told = {a.name for kind in ("params", "moments") for a, _ in _misplaced(context, kind)}
    found: dict[int, list[Argument]] = {}
    for a in context.report.arguments:
        if a.used_ways > 1 and a.name not in told:
            found.setdefault(a.used_ways, []).append(a)
    for ways, each in found.items():
        wasted = sum(a.bytes for a in each) * (ways - 1) // ways
        if wasted >= LARGE_MEMORY * context.report.peak_bytes:
            like = " or ".join(" and ".join(axes) for axes in _axes_of_size(context, ways))
            names, one = (
                ", ".join(a.name for a in each[:3])
                + f" and {len(each) - 3} more" * (len(each) > 3),
                len(each) == 1,
            )
            text = (
                f"{names} {'is' if one else 'are'} replicated on every device, and each uses "
                f"1/{ways} of {'it' if one else 'them'}"
            )
            text += f", as {like} would shard it" if like else ""
            yield Finding(
                "replicated",
                wasted,
                Location(),
                text,
                "give the argument that sharding (jax.device_put, in_shardings)",
            )


def _axes_of_size(context: LintContext, ways: int) -> list[tuple[str, ...]]:
    """Every choice of the fewest mesh axes that together have `ways` devices."""
    axes = [axis for axis, n in context.report.mesh.items() if n > 1]
    for count in range(1, len(axes) + 1):
        if found := [
            each
            for each in itertools.combinations(axes, count)
            if math.prod(context.report.mesh[a] for a in each) == ways
        ]:
            return found
    return []


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    misplaced,
    could_shard,
    used_in_part,
)
