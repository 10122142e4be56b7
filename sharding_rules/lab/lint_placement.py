"""Lint of how the mesh is placed on the hardware.

Mesh axes along which nothing is divided, groups that span more nodes than they need, and
communication that nothing hides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

from sharding_rules.lab.lint_context import (
    EXCHANGES,
    SUMS,
    Finding,
    LintContext,
    MeshAxes,
    name_list,
)
from sharding_rules.lab.lint_pipeline import is_exposed_hop
from sharding_rules.lab.report import SCALAR, Collective, Location
from sharding_rules.lab.targets import TARGETS

# Share of the predicted step: collectives along some mesh axes that leave compute waiting for less
# are not worth a finding.
_LONG_WAIT = 0.1

_ONCE = "once in a step"


def idle_axes(context: LintContext) -> Iterator[Finding]:
    """A mesh axis along which all devices do the same."""
    report = context.report
    for axis, n in report.mesh.items():
        if n == 1:
            continue
        sharded = [argument for argument in report.arguments if axis in argument.axes]
        if any(argument.kind == "batch" for argument in sharded):
            continue
        if _divides_work(context, axis, stores=bool(sharded)):
            continue
        use = f"only stores ({name_list(sharded)})" if sharded else "shards no argument"
        yield Finding(
            check="idle-axis",
            bytes=report.memory.arguments * (n - 1) // n,
            where=Location(),
            text=f"mesh axis {axis} ({n}) {use}: all devices along it compute the same",
            fix=context.vocabulary.fix(
                "idle-axis",
                "shard the batch along {axis}, or weights and the activations they are multiplied "
                "with; else give {axis} one device",
                axis=axis,
                rules=context.rules.name if context.rules else "",
            ),
        )


def _divides_work(context: LintContext, axis: str, stores: bool) -> bool:
    """Whether devices along an axis have different work.

    They have if they sum or exchange, or use what they store without gathering it.
    """
    collectives = list(context.report.select(axis=axis))
    for collective in collectives:
        if collective.payload >= SCALAR and collective.kind in (*SUMS, *EXCHANGES):
            return True
    # What stages and experts store is of no use to others unless it is sent.
    if not stores or axis in context.manual_axes:
        return False
    return all(collective.kind != "all-gather" for collective in collectives)


def placement(context: LintContext) -> Iterator[Finding]:
    """Groups that span more NVLink domains than they need, and tensor groups that span any two."""
    report = context.report
    if report.target not in TARGETS:
        return
    node_size = report.node or TARGETS[report.target].node
    n_inner = 1  # devices along the axes inside of this one
    for axis, n in reversed(report.mesh.items()):
        n_needed = math.ceil(n * n_inner / max(n_inner, node_size))
        n_spanned = report.axis_nodes.get(axis, 1)
        between_nodes = [one for one in report.select(axis=axis) if one.nodes > 1]
        bytes = int(sum(one.times * one.wire for one in between_nodes))
        if n_spanned > n_needed:
            yield Finding(
                check="device-order",
                bytes=bytes,
                where=Location(),
                text=(
                    f"groups of {n} along {axis} span {n_spanned} nodes; {n_needed} would hold them"
                ),
                fix=(
                    "order the devices by node, innermost mesh axis fastest: "
                    "sharding_rules.make_mesh does"
                ),
            )
        elif axis == context.vocabulary.tensor_axis and n_spanned > 1:
            inside = f" (with {n_inner} devices along axes inside of it)" if n_inner > 1 else ""
            yield Finding(
                check="leaves-nvlink",
                bytes=bytes,
                where=Location(),
                text=(
                    f"{axis}={n}{inside} leaves its node of {node_size}: each matmul pair waits "
                    "for the network between nodes"
                ),
                fix=context.vocabulary.fix(
                    "leaves-nvlink",
                    "at most {node} devices along {axis}; give the rest to an axis that shards the "
                    "batch",
                    node=max(1, node_size // n_inner),
                    axis=axis,
                ),
            )
        n_inner *= n


def exposed(context: LintContext) -> Iterator[Finding]:
    """Mesh axes whose collectives in one phase leave compute waiting for a tenth of the step."""
    report = context.report
    if report.timeline is None or report.timeline.step <= 0:
        return
    groups: dict[tuple[MeshAxes, str], list[Collective]] = defaultdict(list)
    for collective in report.collectives:
        if collective.nodes <= 1 or collective.exposed <= 0:
            continue
        # An exposed hop has a finding of its own.
        if not is_exposed_hop(context, collective):
            groups[collective.axes, _time_in_words(context, collective)].append(collective)

    for (axes, time), collectives in groups.items():
        share = sum(collective.exposed for collective in collectives) / report.timeline.step
        if share < _LONG_WAIT:
            continue
        kinds = ", ".join(dict.fromkeys(collective.kind for collective in collectives))
        if time == _ONCE:
            fix = context.vocabulary.fix(
                "exposed-communication",
                "a larger batch, for which as much is sent, or a smaller mesh axis between nodes",
            )
        else:
            fix = context.vocabulary.fix(
                "exposed-in-loops",
                "fewer and larger microbatches, each of which sends it again, or a smaller mesh "
                "axis between nodes",
            )
        yield Finding(
            check="exposed-communication",
            bytes=int(sum(collective.times * collective.wire for collective in collectives)),
            where=max(collectives, key=lambda collective: collective.exposed).where,
            text=(
                f"compute waits {share:.0%} of the predicted step for {kinds} over "
                f"{' and '.join(axes)} {time}"
            ),
            fix=fix,
            severity="notice",
            collectives=tuple(collective.name for collective in collectives),
        )


def _time_in_words(context: LintContext, collective: Collective) -> str:
    """Returns when a step runs a collective.

    What is sent once in a step, after the last microbatch, may take a layer at a time; it hides
    behind nothing else.
    """
    if not collective.loops:
        return _ONCE
    if context.microbatches > 1 and not context.runs_per_microbatch(collective):
        return _ONCE
    phase = collective.where.phase
    return f"in the {phase}" if phase else "in its loops"


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (idle_axes, placement, exposed)
