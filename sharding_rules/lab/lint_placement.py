"""Mesh axes along which nothing is divided, groups that span more nodes than they need, and
communication that nothing hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sharding_rules.lab.lint_context import EXCHANGES, SUMS, Finding, LintContext, names_of
from sharding_rules.lab.lint_pipeline import is_exposed_hop
from sharding_rules.lab.report import SCALAR, Collective, Location
from sharding_rules.lab.targets import TARGETS

_LONG = 0.1
"""Share of the predicted step: collectives along some mesh axes that leave compute waiting for less
are not worth a finding."""
_ONCE = "once in a step"


def idle_axes(context: LintContext) -> Iterator[Finding]:
    """A mesh axis along which all devices do the same."""
    report = context.report
    for axis, n in report.mesh.items():
        sharded = [a for a in report.arguments if axis in a.axes]
        if (
            n == 1
            or any(a.kind == "batch" for a in sharded)
            or _divides_work(context, axis, bool(sharded))
        ):
            continue
        does = f"only stores ({names_of(sharded)})" if sharded else "shards no argument"
        name = context.rules.name if context.rules else ""
        neutral = (
            "shard the batch along {axis}, or weights and the activations they are multiplied "
            "with; else give {axis} one device"
        )
        fix = context.vocabulary.fix("idle-axis", neutral, axis=axis, rules=name)
        text = f"mesh axis {axis} ({n}) {does}: all devices along it compute the same"
        yield Finding("idle-axis", report.memory.arguments * (n - 1) // n, Location(), text, fix)


def _divides_work(context: LintContext, axis: str, stores: bool) -> bool:
    """Whether devices along an axis have different work: they sum or exchange, or use what they
    store without gathering it.
    """
    along = list(context.report.select(axis=axis))
    if any(one.payload >= SCALAR and one.kind in (*SUMS, *EXCHANGES) for one in along):
        return True
    # what stages and experts store is of no use to others unless it is sent
    by_hand = axis in context.manual_axes
    return stores and not by_hand and not any(one.kind == "all-gather" for one in along)


def placement(context: LintContext) -> Iterator[Finding]:
    """Groups along an axis that span more NVLink domains than they need, and tensor groups that
    span any two.
    """
    report = context.report
    if report.target not in TARGETS:
        return
    node, inner = TARGETS[report.target].node, 1
    for axis, n in reversed(report.mesh.items()):
        least = math.ceil(n * inner / max(inner, node))
        spans = report.axis_nodes.get(axis, 1)
        bytes = int(sum(one.times * one.wire for one in report.select(axis=axis) if one.nodes > 1))
        within, inner = inner, inner * n
        if spans > least:
            text = f"groups of {n} along {axis} span {spans} nodes; {least} would hold them"
            fix = (
                "order the devices by node, innermost mesh axis fastest: sharding_rules.make_mesh "
                "does"
            )
            yield Finding("device-order", bytes, Location(), text, fix)
        elif axis == context.vocabulary.tensor_axis and spans > 1:
            beside = f" (with {within} devices along axes inside of it)" if within > 1 else ""
            text = (
                f"{axis}={n}{beside} leaves its node of {node}: each matmul pair waits for the "
                "network between nodes"
            )
            neutral = (
                "at most {node} devices along {axis}; give the rest to an axis that shards the "
                "batch"
            )
            fix = context.vocabulary.fix(
                "leaves-nvlink", neutral, node=max(1, node // within), axis=axis
            )
            yield Finding("leaves-nvlink", bytes, Location(), text, fix)


def exposed(context: LintContext) -> Iterator[Finding]:
    """Mesh axes whose collectives leave compute waiting for a tenth of the predicted step, summed
    over all of them in one phase.
    """
    report = context.report
    if report.timeline is None or report.timeline.step <= 0:
        return
    found: dict[tuple[tuple[str, ...], str], list[Collective]] = {}
    for one in report.collectives:
        # such a hop has a finding of its own
        if one.nodes > 1 and one.exposed > 0 and not is_exposed_hop(context, one):
            found.setdefault((one.axes, _when(context, one)), []).append(one)
    for (axes, when), each in found.items():
        share = sum(one.exposed for one in each) / report.timeline.step
        if share >= _LONG:
            kinds = ", ".join(dict.fromkeys(one.kind for one in each))
            largest = max(each, key=lambda one: one.exposed)
            text = (
                f"compute waits {share:.0%} of the predicted step for {kinds} over "
                f"{' and '.join(axes)} {when}"
            )
            if when == _ONCE:
                neutral = (
                    "a larger batch, for which as much is sent, or a smaller mesh axis between "
                    "nodes"
                )
                fix = context.vocabulary.fix("exposed-communication", neutral)
            else:
                neutral = (
                    "fewer and larger microbatches, each of which sends it again, or a smaller "
                    "mesh axis between nodes"
                )
                fix = context.vocabulary.fix("exposed-in-loops", neutral)
            bytes = int(sum(one.times * one.wire for one in each))
            names = tuple(one.name for one in each)
            yield Finding("exposed-communication", bytes, largest.where, text, fix, "notice", names)


def _when(context: LintContext, one: Collective) -> str:
    """In words. What is sent once in a step, after the last microbatch, may take a layer at a time;
    it hides behind nothing else.
    """
    if not one.loops or (context.microbatches > 1 and not context.each_microbatch(one)):
        return _ONCE
    return f"in the {one.where.phase}" if one.where.phase else "in its loops"


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (idle_axes, placement, exposed)
