"""Lint of arguments that take more memory than they must.

Parameters, moments and tables of which a device holds more than its share.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sharding_rules.lab.lint_context import (
    LARGE_MEMORY,
    Finding,
    LintContext,
    MeshAxes,
    name_list,
    preset_rows,
    short_name,
)
from sharding_rules.lab.report import Argument, Location
from sharding_rules.rules import Kind, axes_of, row_of

_STATE = ("params", "moments")

# Elements of a dimension on each device: without names of dimensions, one is only worth sharding if
# its shards are at least as wide.
_WIDE_SHARD = 1024

# Slots of an optimizer, and arguments, that a text names.
_MAX_NAMES = 3


class _Misplaced(NamedTuple):
    argument: Argument
    missing: set[str]
    """The mesh axes along which it should be sharded and is not."""


def misplaced(context: LintContext) -> Iterator[Finding]:
    """Parameters and moments that the rules shard and the program does not.

    Without rules: moments that are not sharded as their parameters are.
    """
    params = _misplaced(context, "params")
    moments = _misplaced(context, "moments")
    arguments = [one.argument for one in params + moments]
    wasted = sum(
        argument.bytes - argument.bytes // context.ways(missing)
        for argument, missing in params + moments
    )
    if not arguments or wasted < LARGE_MEMORY * context.report.peak_bytes:
        return

    kinds = []
    columns = []
    if params:
        kinds.append("parameters")
        columns.append("rules.params")
    if moments:
        slots = _slots(one.argument for one in moments)
        kinds.append(f"moments ({' and '.join(slots)})")
        columns.append("rules.optimizer")
    if context.rules:
        verb = "shards" if len(columns) == 1 else "shard"
        reason = f"{' and '.join(columns)} {verb} them"
        fix = "place them where the rules say (Rules.sharding)"
    else:
        reason = "their parameters are sharded"
        fix = "give each the sharding of its parameter"
    missing_axes = set().union(*(one.missing for one in params + moments))
    along = " and ".join(axis for axis in context.report.mesh if axis in missing_axes)
    yield Finding(
        check="replicated",
        bytes=wasted,
        where=Location(),
        text=(
            f"{' and '.join(kinds)} of {name_list(arguments)} are replicated along {along}, "
            f"along which {reason}"
        ),
        fix=fix,
    )


def misplaced_moments(context: LintContext) -> bool:
    """Whether an optimizer's state is not sharded as it should be."""
    return bool(_misplaced(context, "moments"))


def _misplaced(context: LintContext, kind: str) -> list[_Misplaced]:
    misplaced = []
    for argument in context.report.arguments:
        if argument.kind != kind:
            continue
        missing = _expected_axes(context, argument) - set(argument.axes)
        if missing:
            misplaced.append(_Misplaced(argument, missing))
    return misplaced


def _misplaced_names(context: LintContext) -> set[str]:
    return {one.argument.name for kind in _STATE for one in _misplaced(context, kind)}


def _expected_axes(context: LintContext, argument: Argument) -> set[str]:
    """Returns the mesh axes that it should be sharded along; none where nothing says so."""
    if context.rules is not None:
        if not context.logical_axes(argument):
            return set()
        kind: Kind = "params" if argument.kind == "params" else "optimizer"
        return context.promised_axes(argument, kind) or set()
    if argument.kind != "moments":
        return set()
    name = short_name(argument)
    params = [
        param
        for param in context.params
        if short_name(param) == name and param.shape == argument.shape
    ]
    return set(params[0].axes) if len(params) == 1 else set()


def _slots(moments: Iterable[Argument]) -> list[str]:
    """Returns the names of an optimizer's slots in the arguments' paths, such as mu and nu.

    The last word of a path is the parameter's name, and the word before it that of the slot.
    """
    slots = []
    for moment in moments:
        # A word of a path: state, ['mu'], .mu
        matches = re.findall(r"^(\w+)|\['([^']*)'\]|\.(\w+)", moment.name)
        words = [root or key or attribute for root, key, attribute in matches]
        slots.append(words[-2] if len(words) > 1 else words[-1])
    return list(dict.fromkeys(slots))[:_MAX_NAMES]


def could_shard(context: LintContext) -> Iterator[Finding]:
    """Parameters and moments that are replicated along an axis that shards others of their kind.

    Those that the rules replicate on purpose are left out.
    """
    in_other_findings = _misplaced_names(context)
    groups: dict[tuple[str, str], list[Argument]] = defaultdict(list)
    for kind in _STATE:
        arguments = [a for a in context.report.arguments if a.kind == kind]
        for axis in sorted({axis for argument in arguments for axis in argument.axes}):
            for argument in arguments:
                if argument.name in in_other_findings or axis in argument.axes:
                    continue
                row = _possible_row(context, argument, axis)
                if row is not None:
                    groups[axis, row].append(argument)

    for (axis, row), arguments in groups.items():
        ways = context.report.mesh[axis]
        wasted = sum(argument.bytes for argument in arguments) * (ways - 1) // ways
        if wasted < LARGE_MEMORY * context.report.peak_bytes:
            continue
        if row:
            table = f"rules.params[{row!r}] and rules.activations[{row!r}]"
        else:
            table = "a row of rules.params"
        verb = "is" if len({short_name(argument) for argument in arguments}) == 1 else "are"
        yield Finding(
            check="replicated",
            bytes=wasted,
            where=Location(),
            text=(
                f"{name_list(arguments)} {verb} replicated along {axis}, which shards others of "
                f"their kind {ways} ways"
            ),
            fix=f"put {axis!r} into {table}",
            severity="error" if row else "notice",
        )


def _possible_row(context: LintContext, argument: Argument, axis: str) -> str | None:
    """Returns the row that could shard an argument along a mesh axis, None if there is none.

    "" where dimensions have no names, and one of them is wide enough.
    """
    logical = context.logical_axes(argument)
    ways = context.report.mesh[axis]
    if not logical:
        if axis == context.vocabulary.pipeline_axis:
            # What is outside of the layers (embedding, head) is replicated over the stages.
            return None
        is_wide = any(size % ways == 0 and size >= _WIDE_SHARD * ways for size in argument.shape)
        return "" if is_wide else None

    kind: Kind = "params" if argument.kind == "params" else "optimizer"
    column = context.rules.column(kind) if context.rules else {}
    usual_rows = preset_rows("params")
    if argument.kind == "moments":
        usual_rows |= preset_rows("optimizer")
    for name, size in zip(logical, argument.shape, strict=False):
        if not name or (name, axis) not in usual_rows:
            continue
        row = row_of(column, name)
        other_axes = set(axes_of(column[row])) - {axis} if row else set()
        if size % (ways * context.ways(other_axes)) == 0:
            return name
    return None


def used_in_part(context: LintContext) -> Iterator[Finding]:
    """Arguments that every device holds whole, and of which each uses only its own slice."""
    in_other_findings = _misplaced_names(context)
    arguments_by_ways: dict[int, list[Argument]] = defaultdict(list)
    for argument in context.report.arguments:
        if argument.used_ways > 1 and argument.name not in in_other_findings:
            arguments_by_ways[argument.used_ways].append(argument)

    for ways, arguments in arguments_by_ways.items():
        wasted = sum(argument.bytes for argument in arguments) * (ways - 1) // ways
        if wasted < LARGE_MEMORY * context.report.peak_bytes:
            continue
        names = ", ".join(argument.name for argument in arguments[:_MAX_NAMES])
        if len(arguments) > _MAX_NAMES:
            names += f" and {len(arguments) - _MAX_NAMES} more"
        verb = "is" if len(arguments) == 1 else "are"
        pronoun = "it" if len(arguments) == 1 else "them"
        choices = [" and ".join(axes) for axes in _smallest_axes(context, ways)]
        comparison = f", as {' or '.join(choices)} would shard it" if choices else ""
        yield Finding(
            check="replicated",
            bytes=wasted,
            where=Location(),
            text=(
                f"{names} {verb} replicated on every device, and each uses 1/{ways} of {pronoun}"
                f"{comparison}"
            ),
            fix="give the argument that sharding (jax.device_put, in_shardings)",
        )


def _smallest_axes(context: LintContext, ways: int) -> list[MeshAxes]:
    """Returns every choice of the fewest mesh axes that together have `ways` devices."""
    mesh = context.report.mesh
    axes = [axis for axis, n in mesh.items() if n > 1]
    for n_axes in range(1, len(axes) + 1):
        choices = [
            choice
            for choice in itertools.combinations(axes, n_axes)
            if math.prod(mesh[axis] for axis in choice) == ways
        ]
        if choices:
            return choices
    return []


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    misplaced,
    could_shard,
    used_in_part,
)
