"""What is wrong with a pipelined program: stages take different branches, and all of them wait for
the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sharding_rules.lab.lint_context import Finding, LintContext
from sharding_rules.lab.prices import MEMORY
from sharding_rules.lab.report import SCALAR, Collective, Copy, Location
from sharding_rules.lab.targets import TARGETS

_DEAR = 0.01
"""Share of the predicted step: copies that take less are not worth a finding."""


def stage_branches(context: LintContext) -> Iterator[Finding]:
    """Collectives in a branch whose groups have devices that may not take it: they hang."""
    for one in context.report.collectives if context.staged else ():
        if not one.conditional:
            continue
        what = f"{one.kind} of {' '.join(one.shapes)} over {' and '.join(one.axes)} in a branch"
        neutral = "run both branches and select the result, or move it out of the conditional"
        fix = context.vocabulary.fix("branch-collective", neutral)
        if one.kind == "collective-permute":
            text = f"{what}: all devices meet for it, and not all of them come"
            yield Finding("branch-collective", int(one.times * one.wire), one.where, text, fix)
        elif context.vocabulary.pipeline_axis in one.axes:
            text = f"{what}: its groups span stages, which do not all take it"
            yield Finding("branch-collective", int(one.times * one.wire), one.where, text, fix)


def exposed_hops(context: LintContext) -> Iterator[Finding]:
    """Sends from stage to stage with no matmul between their start and their done: at best they run
    beside writes of a stash.
    """
    for one in context.report.collectives:
        if is_exposed_hop(context, one):
            text = (
                f"{one.kind} of {' '.join(one.shapes)} over {' and '.join(one.axes)} in each of "
                f"{one.times} ticks: no matmul hides it"
            )
            neutral = (
                "XLA's flags of the set pipeline (sharding_rules.lab.flags); where the peak is "
                "above XLA's limit, 76 % of the memory, it saves memory instead: raise "
                "xla_gpu_memory_limit_slop_factor"
            )
            fix = context.vocabulary.fix("exposed-hop", neutral)
            yield Finding("exposed-hop", int(one.times * one.wire), one.where, text, fix, "notice")


def is_exposed_hop(context: LintContext, one: Collective) -> bool:
    """Whether a collective is a stage's send to the next stage, in every tick, that no matmul
    hides.
    """
    hop = (
        one.kind == "collective-permute"
        and context.vocabulary.pipeline_axis in one.axes
        and bool(one.loops)
    )
    return hop and not one.conditional and one.payload >= SCALAR and not one.flops_hidden_behind


def whole_hops(context: LintContext) -> Iterator[Finding]:
    """Sends of whole sequences from stage to stage, where the rules shard the residual stream along
    the sequence.
    """
    ways = context.ways(context.gathers_residual) if context.rules else 1
    sends = [
        piece
        for piece in context.pieces
        if piece.one.kind == "collective-permute" and context.is_residual(piece.array)
    ]
    hops = [piece for piece in sends if context.vocabulary.pipeline_axis in piece.one.axes]
    if ways > 1 and hops:
        largest, along = (
            max(hops, key=lambda piece: piece.bytes),
            " and ".join(sorted(context.gathers_residual)),
        )
        text = (
            f"collective-permute of {largest.array} over {largest.along}: stages send each other "
            f"whole sequences, {ways} times what "
        )
        text += (
            "rules.activations['seq_resid'] leaves of them on a device, which is sharded along "
            f"{along}"
        )
        fix = "pin what a stage sends and receives: shard(x, 'batch', 'seq_resid', 'embed')"
        names = tuple(dict.fromkeys(piece.one.name for piece in hops))
        yield Finding(
            "reshard",
            int(sum(piece.bytes for piece in hops)),
            largest.one.where,
            text,
            fix,
            collectives=names,
        )


def copies(context: LintContext) -> Iterator[Finding]:
    """Arrays that the loop over ticks carries and XLA copies completely in each tick, such as those
    that a conditional changes.
    """
    report = context.report
    if report.timeline is None or report.target not in TARGETS:
        return
    hops = {
        shape
        for one in report.select("collective-permute", context.vocabulary.pipeline_axis)
        for shape in one.shapes
    }
    found: dict[str, list[Copy]] = {}
    for one in report.copies:
        if one.shape not in hops:  # one microbatch between two stages
            found.setdefault(one.shape, []).append(one)
    for shape, each in found.items():
        moved = sum(2 * one.bytes * one.times for one in each)
        if (
            1e6 * moved / (MEMORY * TARGETS[report.target].hbm_bandwidth)
            >= _DEAR * report.timeline.step
        ):
            text = (
                f"{shape}, which the loop over ticks carries, is copied whole "
                f"{sum(one.times for one in each)} times in a step"
            )
            fix = (
                "read slots of it before the conditional and write them after it; add gradients up "
                "outside of it"
            )
            yield Finding(
                "whole-copy", moved, max(each, key=lambda one: one.times).where, text, fix, "notice"
            )


def useless_slots(context: LintContext) -> Iterator[Finding]:
    """A slot that does not count what it should."""
    for line in context.report.warnings:
        if line.startswith("slot "):
            fix = (
                "scope: that of jax.named_scope around the conditional; stages: a letter for each "
                "trip of the loop"
            )
            yield Finding("slot", 0, Location(), line, fix, "notice")


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    stage_branches,
    exposed_hops,
    whole_hops,
    copies,
    useless_slots,
)
