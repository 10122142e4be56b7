"""Lint of a compiled program: each finding names the place, the bytes, and what to change.

A check is a function from a LintContext to findings. It is silent where it cannot be sure.
Collectives with less than 1 % of the step's wire bytes, and arrays with less than 5 % of the memory
at the peak, are never worth a finding (`lint_context.LARGE_WIRE`, `lint_context.LARGE_MEMORY`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from sharding_rules.lab import (
    lint_experts,
    lint_pipeline,
    lint_placement,
    lint_reductions,
    lint_reshards,
    lint_segments,
    lint_state,
    lint_weights,
)
from sharding_rules.lab.hlo import Array, arrays
from sharding_rules.lab.lint_context import Finding, LintContext, LogicalAxes, name_list
from sharding_rules.lab.report import Location, Report
from sharding_rules.presets import PRESETS
from sharding_rules.rules import Kind, Rules, axes_of, row_of

# Characters of a warning of XLA that a finding quotes.
_WARNING_WIDTH = 400


def lint(
    report: Report, rules: Rules | None = None, axes: LogicalAxes | None = None
) -> tuple[Finding, ...]:
    """Returns everything that CHECKS find, errors before notices, most bytes first.

    Args:
      report: the program.
      rules: those that the program was written for. Without them lint compares with how the
        arguments are sharded.
      axes: logical axes of each parameter by name. With them findings name the row of the rules.
        None: those of the report, if the trainer gave it some.
    """
    program = LintContext(report, rules, axes or report.logical)
    segments = lint_segments.split(program)
    findings: dict[tuple[str, str, Location], Finding] = {}
    for check in CHECKS:
        for context in segments if check in _CHECKS_BY_SEGMENT else [program]:
            for finding in check(context):
                # Two segments may have the same finding.
                findings.setdefault((finding.check, finding.text, finding.where), finding)

    located = [
        dataclasses.replace(finding, segments=lint_segments.finding_segments(report, finding))
        for finding in findings.values()
    ]
    return tuple(sorted(located, key=_rank))


def _rank(finding: Finding) -> tuple[bool, bool, int]:
    # A rematerialization has no bytes to be sorted by.
    return finding.severity != "error", finding.check != "rematerialization", -finding.bytes


# XLA's warnings.


def rematerializations(context: LintContext) -> Iterator[Finding]:
    """The partitioner gave up: it replicates an array and shards it again."""
    for line in dict.fromkeys(context.report.warnings):
        if "rematerialization" not in line:
            continue
        yield Finding(
            check="rematerialization",
            bytes=0,
            where=Location(),
            text=line.strip()[:_WARNING_WIDTH],
            fix=context.vocabulary.fix(
                "rematerialization",
                "pin that array (jax.lax.with_sharding_constraint); look a sharded table up by "
                "hand, in a shard_map",
            ),
        )


def unknown_loops(context: LintContext) -> Iterator[Finding]:
    """A loop whose trips XLA does not know: what it sends and computes is counted once."""
    for line in context.report.warnings:
        if "how often this loop runs" in line:
            yield Finding(
                check="unknown-loop",
                bytes=0,
                where=Location(),
                text=line,
                fix="a loop of fixed length: lax.scan, or fori_loop with Python bounds",
                severity="notice",
            )


# Rules.


def dead_rules(context: LintContext) -> Iterator[Finding]:
    """A row that names no dimension of the model, but almost does.

    After a typo, the row that was meant is as it was before.
    """
    if not (context.rules and context.axes):
        return
    known_axes = _known_axes(context)
    for kind, row, entry in _unmatched_rows(context.rules, known_axes):
        near = difflib.get_close_matches(row, known_axes, n=1)
        if not near:
            continue
        fix = f"did you mean rules.{kind}[{near[0]!r}]?"
        if entry is None:
            # A notice only: activations of a model's own may have names close to a parameter's.
            yield Finding(
                check="dead-rule",
                bytes=0,
                where=Location(),
                text=(
                    f"rules.{kind}[{row!r}] = None changes nothing: no parameter has a dimension "
                    f"{row!r}"
                ),
                fix=fix,
                severity="notice",
            )
        axes = axes_of(entry)
        ways = context.ways(axes)
        if ways == 1:
            continue
        replicated = []
        for argument in context.report.arguments:
            if near[0] in context.logical_axes(argument) and not set(axes) & set(argument.axes):
                replicated.append(argument)
        consequence = f"; {name_list(replicated)} stay whole" if replicated else ""
        yield Finding(
            check="dead-rule",
            bytes=sum(argument.bytes for argument in replicated) * (ways - 1) // ways,
            where=Location(),
            text=(
                f"rules.{kind}[{row!r}] = {entry!r} shards nothing: no parameter has a dimension "
                f"{row!r}{consequence}"
            ),
            fix=fix,
        )


def _known_axes(context: LintContext) -> list[str]:
    """Returns the logical axes of the model and of all presets."""
    names: set[str] = set()
    for axes in context.axes.values():
        names.update(axis for axis in axes if axis)
    for rules in PRESETS.values():
        for kind in get_args(Kind):
            names.update(getattr(rules, kind) or {})
    return sorted(names)


def _unmatched_rows(
    rules: Rules, known_axes: Sequence[str]
) -> list[tuple[str, str, str | tuple[str, ...] | None]]:
    """Returns (column, row, entry) of each row that names no known axis.

    A row that stands in several columns with the same entry is that of the first one.
    """
    axes = dict.fromkeys(known_axes)
    columns: dict[tuple, str] = {}
    for kind in reversed(get_args(Kind)):
        for row, entry in (getattr(rules, kind) or {}).items():
            if not row_of(axes, row):
                columns[row, entry] = kind
    return [(kind, row, entry) for (row, entry), kind in columns.items()]


# Kernels.


def global_kernels(context: LintContext) -> Iterator[Finding]:
    """A kernel whose operands have the whole batch, or all heads.

    Under plain jit XLA gathers a custom call's operands. Sequences may be merged with heads:
    [S, B, N, H] is passed as [1, S, B N, H].
    """
    for target, shapes, location in context.report.kernels:
        operands = [array for shape in shapes for array in arrays(shape)]
        unsharded = {
            "batch": [array for array in operands if _has_whole_batch(context, array)],
            "heads": [array for array in operands if _has_all_heads(context, array)],
        }
        for row, operands in unsharded.items():
            if not operands:
                continue
            yield Finding(
                check="global-kernel",
                bytes=sum(array.bytes for array in operands),
                where=location,
                text=(
                    f"{target} runs on {', '.join(map(str, operands))}: the whole {row}, which "
                    f"rules.activations[{row!r}] shards"
                ),
                fix=(
                    "call it on local shards: shard.shard_map(kernel, in_specs, out_specs) at "
                    f"{location.source or location.part}"
                ),
            )


def _has_whole_batch(context: LintContext, array: Array) -> bool:
    """Whether an operand has the rows of all devices."""
    n_rows = context.batch_rows
    local_rows, _ = context.local_batch
    if not _has_sequences(context, array) or local_rows >= n_rows:
        return False
    if array.dims[0] == n_rows:
        return True
    # Rows may be merged with this device's heads.
    n_heads = _axis_size(context, "heads")
    merged = n_rows * n_heads // context.ways(context.activation_axes("heads"))
    return array.dims[0] == 1 and merged in _other_dims(context, array)


def _has_all_heads(context: LintContext, array: Array) -> bool:
    """Whether an operand has the heads of all devices, or their product with its rows."""
    n_heads = _axis_size(context, "heads")
    if not _has_sequences(context, array) or not n_heads:
        return False
    if context.ways(context.activation_axes("heads")) == 1:
        return False
    local_rows, _ = context.local_batch
    merged_rows = max(1, local_rows // array.dims[0])
    return n_heads * merged_rows in _other_dims(context, array)


def _has_sequences(context: LintContext, array: Array) -> bool:
    _, local_columns = context.local_batch
    return len(array.dims) > 2 and local_columns > 0 and local_columns in array.dims


def _other_dims(context: LintContext, array: Array) -> list[int]:
    """Returns the dimensions after the first, without one of the sequence and one of head_dim."""
    _, local_columns = context.local_batch
    dims = list(array.dims[1:])
    for size in (local_columns, _axis_size(context, "head_dim")):
        if size in dims:
            dims.remove(size)
    return dims


def _axis_size(context: LintContext, name: str) -> int:
    """Returns the size of a logical axis of the parameters; 0 if none has it."""
    size = 0
    for param in context.params:
        for dim, axis in enumerate(context.logical_axes(param)):
            if axis and axis.rpartition("/")[2] == name:
                size = param.shape[dim]
    return size


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    rematerializations,
    unknown_loops,
    dead_rules,
    global_kernels,
    *lint_reshards.CHECKS,
    *lint_weights.CHECKS,
    *lint_state.CHECKS,
    *lint_placement.CHECKS,
    *lint_reductions.CHECKS,
    *lint_pipeline.CHECKS,
    *lint_experts.CHECKS,
)

# These checks look at the layers of one segment at a time, so that one segment hides nothing in
# another. The others look at the whole program: its state, its mesh, sums of gradients that XLA may
# have merged, and what stages send each other.
_CHECKS_BY_SEGMENT = {
    global_kernels,
    lint_reshards.reshards,
    *lint_weights.CHECKS,
    lint_reductions.reduction_dtype,
    lint_reductions.residual_not_sharded,
    *lint_experts.CHECKS,
}
