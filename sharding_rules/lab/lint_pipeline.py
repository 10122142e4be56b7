"""Lint of a pipelined program.

Its stages take different branches, and all of them wait for the slowest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from sharding_rules.lab.lint_context import (
    Finding,
    LintContext,
    instructions,
    largest,
    wire_bytes,
)
from sharding_rules.lab.rates import OPTIMISTIC
from sharding_rules.lab.report import SCALAR, Collective, Copy, Location
from sharding_rules.lab.targets import TARGETS

# Share of the predicted step: copies that take less are not worth a finding.
_LONG_COPY = 0.01


def stage_branches(context: LintContext) -> Iterator[Finding]:
    """Collectives in a branch whose groups have devices that may not take it: they hang."""
    if context.n_stages <= 1:
        return
    for collective in context.report.collectives:
        if not collective.conditional:
            continue
        if collective.kind == "collective-permute":
            consequence = "all devices meet for it, and not all of them come"
        elif context.vocabulary.pipeline_axis in collective.axes:
            consequence = "its groups span stages, which do not all take it"
        else:
            continue
        yield Finding(
            check="branch-collective",
            bytes=int(collective.times * collective.wire),
            where=collective.where,
            text=f"{_in_words(collective)} in a branch: {consequence}",
            fix=context.vocabulary.fix(
                "branch-collective",
                "run both branches and select the result, or move it out of the conditional",
            ),
        )


def exposed_hops(context: LintContext) -> Iterator[Finding]:
    """Sends from stage to stage that no matmul hides.

    At best they run beside writes of a stash.
    """
    for collective in context.report.collectives:
        if not is_exposed_hop(context, collective):
            continue
        yield Finding(
            check="exposed-hop",
            bytes=int(collective.times * collective.wire),
            where=collective.where,
            text=(
                f"{_in_words(collective)} in each of {collective.times:.10g} ticks: no matmul "
                "hides it"
            ),
            fix=context.vocabulary.fix(
                "exposed-hop",
                "XLA's flags of the set pipeline (sharding_rules.lab.flags); where the peak is "
                "above XLA's limit, 76 % of the memory, it saves memory instead: raise "
                "xla_gpu_memory_limit_slop_factor",
            ),
            severity="notice",
        )


def is_exposed_hop(context: LintContext, collective: Collective) -> bool:
    """Whether it is a send to the next stage, in every tick, that no matmul hides."""
    if not is_hop(context, collective):
        return False
    if not collective.loops or collective.conditional:
        return False
    return collective.payload >= SCALAR and not collective.flops_hidden_behind


def is_hop(context: LintContext, collective: Collective) -> bool:
    """Whether it is a send from stage to stage."""
    along_stages = context.vocabulary.pipeline_axis in collective.axes
    return collective.kind == "collective-permute" and along_stages


def _in_words(collective: Collective) -> str:
    shapes = " ".join(collective.shapes)
    return f"{collective.kind} of {shapes} over {' and '.join(collective.axes)}"


def whole_hops(context: LintContext) -> Iterator[Finding]:
    """Sends of whole sequences from stage to stage, where the rules shard the residual stream."""
    ways = context.ways(context.residual_gather_axes) if context.rules else 1
    if ways <= 1:
        return
    hops = []
    for piece in context.pieces:
        if is_hop(context, piece.collective) and context.is_residual(piece.array):
            hops.append(piece)
    if not hops:
        return
    worst = largest(hops)
    yield Finding(
        check="reshard",
        bytes=wire_bytes(hops),
        where=worst.collective.where,
        text=(
            f"collective-permute of {worst.array} over {worst.along}: stages send each other "
            f"whole sequences, {ways} times what rules.activations['seq_resid'] leaves of them on "
            "a device, which is sharded along "
            f"{' and '.join(sorted(context.residual_gather_axes))}"
        ),
        fix="pin what a stage sends and receives: shard(x, 'batch', 'seq_resid', 'embed')",
        collectives=instructions(hops),
    )


def copies(context: LintContext) -> Iterator[Finding]:
    """Arrays that the loop over ticks carries and that XLA copies completely in each tick.

    An example is an array that a conditional changes.
    """
    report = context.report
    if report.timeline is None or report.target not in TARGETS:
        return
    hop_shapes: set[str] = set()
    for hop in report.select("collective-permute", context.vocabulary.pipeline_axis):
        hop_shapes.update(hop.shapes)
    copies_by_shape: dict[str, list[Copy]] = defaultdict(list)
    for copy in report.copies:
        # Arrays with the shape of a hop are one microbatch between two stages.
        if copy.shape not in hop_shapes:
            copies_by_shape[copy.shape].append(copy)

    share = OPTIMISTIC.memory["bf16"].value
    bandwidth = share * TARGETS[report.target].hbm_bandwidth
    for shape, copies in copies_by_shape.items():
        # Each copy is read and written.
        moved_bytes = int(sum(2 * copy.bytes * copy.times for copy in copies))
        if 1e6 * moved_bytes / bandwidth < _LONG_COPY * report.timeline.step:
            continue
        yield Finding(
            check="whole-copy",
            bytes=moved_bytes,
            where=max(copies, key=lambda copy: copy.times).where,
            text=(
                f"{shape}, which the loop over ticks carries, is copied whole "
                f"{sum(copy.times for copy in copies):.10g} times in a step"
            ),
            fix=(
                "read slots of it before the conditional and write them after it; add gradients up "
                "outside of it"
            ),
            severity="notice",
        )


def useless_slots(context: LintContext) -> Iterator[Finding]:
    """A slot or a probability that does not count what it should."""
    for line in context.report.warnings:
        if line.startswith(("slot ", "probability ")):
            yield Finding(
                check="slot",
                bytes=0,
                where=Location(),
                text=line,
                fix=(
                    "scope: that of jax.named_scope around the conditional; stages: a letter for "
                    "each trip of the loop"
                ),
                severity="notice",
            )


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    stage_branches,
    exposed_hops,
    whole_hops,
    copies,
    useless_slots,
)
