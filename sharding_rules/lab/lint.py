"""What is wrong with a compiled program: each check names the place, the bytes, and the rule or
line to change.

A check is silent where it cannot be sure. Collectives with less than 1 % of the step's wire bytes,
and arrays with less than 5 % of the memory at the peak, are never worth a finding
(`lint_context.LARGE_WIRE`, `lint_context.LARGE_MEMORY`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from typing import get_args

from sharding_rules.lab import (
    lint_pipeline,
    lint_placement,
    lint_reductions,
    lint_reshards,
    lint_segments,
    lint_state,
    lint_weights,
)
from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.lint_context import Finding, LintContext, LogicalAxes, names_of
from sharding_rules.lab.report import Location, Report
from sharding_rules.presets import PRESETS
from sharding_rules.rules import Kind, Rules, axes_of, row_of


def lint(
    report: Report, rules: Rules | None = None, axes: LogicalAxes | None = None
) -> tuple[Finding, ...]:
    """Everything that CHECKS find, errors before notices, most bytes first.

    Args:
      rules: those that the program was written for. Without them lint compares with how the
      arguments are sharded. axes: logical axes of each parameter by name. With them findings name
      the row of the rules. None: those of the report, if the
        trainer gave it some.
    """
    context = LintContext(report, rules, axes or report.logical)
    parts = lint_segments.parts(context)
    found: dict[tuple[str, str, Location], Finding] = {}
    for check in CHECKS:
        for one in (
            one for part in (parts if check in _BY_SEGMENT else [context]) for one in check(part)
        ):
            found.setdefault(
                (one.check, one.text, one.where),
                dataclasses.replace(one, segments=lint_segments.segments_of(report, one)),
            )
    return tuple(
        sorted(
            found.values(),
            key=lambda one: (one.severity != "error", one.check != "rematerialization", -one.bytes),
        )
    )


def rematerializations(context: LintContext) -> Iterator[Finding]:
    """The partitioner gave up: it replicates an array and shards it again."""
    for line in dict.fromkeys(
        line for line in context.report.warnings if "rematerialization" in line
    ):
        neutral = (
            "pin that array (jax.lax.with_sharding_constraint); look a sharded table up by hand, "
            "in a shard_map"
        )
        fix = context.vocabulary.fix("rematerialization", neutral)
        yield Finding("rematerialization", 0, Location(), line.strip()[:400], fix)


def unknown_loops(context: LintContext) -> Iterator[Finding]:
    """A loop whose trips XLA does not know: what it sends and computes is counted once."""
    for line in context.report.warnings:
        if "how often this loop runs" in line:
            yield Finding(
                "unknown-loop",
                0,
                Location(),
                line,
                "a loop of fixed length: lax.scan, or fori_loop with Python bounds",
                "notice",
            )


def dead_rules(context: LintContext) -> Iterator[Finding]:
    """A row that names no dimension of the model, but nearly so: a typo leaves the right row as it
    was.
    """
    if not (context.rules and context.axes):
        return
    known = dict.fromkeys(axis for axes in context.axes.values() for axis in axes if axis)
    known |= dict.fromkeys(
        row
        for rules in PRESETS.values()
        for kind in get_args(Kind)
        for row in getattr(rules, kind) or {}
    )
    of_kind = {kind: getattr(context.rules, kind) or {} for kind in reversed(get_args(Kind))}
    rows = {
        (row, entry): kind
        for kind, own in of_kind.items()
        for row, entry in own.items()
        if not row_of(known, row)
    }
    for (row, entry), kind in rows.items():
        ways, near = (
            context.ways(axes_of(entry)),
            difflib.get_close_matches(row, sorted(known), n=1),
        )
        if not near:
            continue
        # activations of a model's own may have names that nearly are a parameter's
        if entry is None:
            text = (
                f"rules.{kind}[{row!r}] = None changes nothing: no parameter has a dimension "
                f"{row!r}"
            )
            yield Finding(
                "dead-rule",
                0,
                Location(),
                text,
                f"did you mean rules.{kind}[{near[0]!r}]?",
                "notice",
            )
        if ways == 1:
            continue
        held = [
            a
            for a in context.report.arguments
            if near[0] in context.logical(a) and not set(axes_of(entry)) & set(a.axes)
        ]
        text = (
            f"rules.{kind}[{row!r}] = {entry!r} shards nothing: no parameter has a dimension "
            f"{row!r}"
        )
        text += f"; {names_of(held)} stay whole" if held else ""
        wasted = sum(a.bytes for a in held) * (ways - 1) // ways
        yield Finding(
            "dead-rule", wasted, Location(), text, f"did you mean rules.{kind}[{near[0]!r}]?"
        )


def global_kernels(context: LintContext) -> Iterator[Finding]:
    """A kernel whose operands have the whole batch, or all heads: under plain jit XLA gathers a
    custom call's operands.

    Sequences may be merged with heads: [S, B, N, H] is passed as [1, S, B N, H].
    """
    (B, _), (b, s) = context.batch, context.local_batch
    named = (
        (axis, a.shape[dim])
        for a in context.params
        for dim, axis in enumerate(context.logical(a))
        if axis
    )
    sizes = {axis.rpartition("/")[2]: size for axis, size in named}
    N, H = sizes.get("heads", 0), sizes.get("head_dim", 0)
    ways = context.ways(context.shards_activation("heads"))
    for target, shapes, where in context.report.kernels:
        held = [
            array
            for shape in shapes
            for array in arrays(shape)
            if len(array.dims) > 2 and s and s in array.dims
        ]
        batch = [
            array
            for array in held
            if b < B == array.dims[0]
            or (array.dims[0] == 1 and b < B and B * N // ways in _left(array.dims, s, H))
        ]
        heads = [
            array
            for array in held
            if ways > 1 and N and N * max(1, b // array.dims[0]) in _left(array.dims, s, H)
        ]
        for found, row in ((batch, "batch"), (heads, "heads")):
            if found:
                text = (
                    f"{target} runs on {', '.join(map(str, found))}: the whole {row}, which "
                    f"rules.activations[{row!r}] shards"
                )
                fix = (
                    "call it on local shards: shard.shard_map(kernel, in_specs, out_specs) at "
                    f"{where.source or where.part}"
                )
                yield Finding(
                    "global-kernel", sum(array.bytes for array in found), where, text, fix
                )


def _left(dims: tuple[int, ...], *known: int) -> list[int]:
    left = list(dims[1:])
    for size in known:
        if size in left:
            left.remove(size)
    return left


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    rematerializations, unknown_loops, dead_rules, global_kernels, *lint_reshards.CHECKS,
    *lint_weights.CHECKS, *lint_state.CHECKS,
    *lint_placement.CHECKS, *lint_reductions.CHECKS, *lint_pipeline.CHECKS,
)  # fmt: skip
_BY_SEGMENT = {
    global_kernels, lint_reshards.reshards, *lint_weights.CHECKS, lint_reductions.reduction_dtype,
    lint_reductions.residual_not_sharded,
}  # fmt: skip
"""Those that look at each segment's layers alone, so that one segment hides nothing in another.
What is in no segment is looked at with all parameters, because XLA merges what several segments
send. The others look at the whole program: its state, its mesh, sums of gradients that XLA may have
merged, and what stages send each other."""
