"""Lint of a model with several segments, one at a time.

Rules differ between segments, and weights of several segments may have the same shape.
"""

from __future__ import annotations

import dataclasses

from sharding_rules.lab.lint_context import Finding, LintContext
from sharding_rules.lab.report import Report
from sharding_rules.lab.segments import segment_of, segment_of_argument


def split(context: LintContext) -> list[LintContext]:
    """Returns a context for each segment and one for what is outside of them.

    A segment's context has what is in its layers, its parameters, and those outside of segments.
    The last one has all parameters, because XLA merges what several segments send. A model of fewer
    than two segments is not split.
    """
    segments = context.report.segments
    if len(segments) < 2:
        return [context]
    return [_restrict(context, segment) for segment in (*segments, "")]


def _restrict(context: LintContext, segment: str) -> LintContext:
    """Returns the context of one segment; of what is in no segment for ""."""
    report = context.report
    arguments = report.arguments
    if segment:
        segments = ("", segment)
        arguments = tuple(a for a in arguments if segment_of_argument(report, a) in segments)
    part = dataclasses.replace(
        report,
        arguments=arguments,
        collectives=tuple(
            collective
            for collective in report.collectives
            if segment_of(report, collective.where) == segment
        ),
        kernels=tuple(
            kernel for kernel in report.kernels if segment_of(report, kernel[2]) == segment
        ),
    )
    return dataclasses.replace(context, report=part, segment=segment, step=report)


def finding_segments(report: Report, finding: Finding) -> tuple[str, ...]:
    """Returns the segments of a finding's collectives, in model order.

    For a finding about no collectives, they are those of its location.
    """
    if len(report.segments) < 2:
        return ()
    locations = [
        collective.where
        for collective in report.collectives
        if collective.name in finding.collectives
    ]
    segments = {segment_of(report, location) for location in locations or [finding.where]}
    return tuple(segment for segment in report.segments if segment in segments)
