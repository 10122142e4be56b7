"""Lint of a model with several segments, one at a time: rules differ between them, and weights of
several may have the same shape.
"""

from __future__ import annotations

import dataclasses

from sharding_rules.lab.lint_context import Finding, LintContext
from sharding_rules.lab.report import Report
from sharding_rules.lab.segments import segment_of, segment_of_argument


def parts(context: LintContext) -> list[LintContext]:
    """A context for each segment and one for the rest; the whole one alone for a model of fewer
    than two segments.

    A segment's has what is in its layers, its parameters, and those outside of segments. The rest's
    has all parameters, because XLA merges what several segments send.
    """
    segments = context.report.segments
    return (
        [_within(context, segment) for segment in (*segments, "")]
        if len(segments) > 1
        else [context]
    )


def _within(context: LintContext, segment: str) -> LintContext:
    report, outside = context.report, ("", segment)
    given = (
        a for a in report.arguments if not segment or segment_of_argument(report, a) in outside
    )
    part = dataclasses.replace(
        report,
        arguments=tuple(given),
        collectives=tuple(
            one for one in report.collectives if segment_of(report, one.where) == segment
        ),
        kernels=tuple(
            kernel for kernel in report.kernels if segment_of(report, kernel[2]) == segment
        ),
    )
    return dataclasses.replace(context, report=part, segment=segment, step=report)


def segments_of(report: Report, found: Finding) -> tuple[str, ...]:
    """The segments that a finding is about, in model order; those of its place for one that is
    about no collectives.
    """
    if len(report.segments) < 2:
        return ()
    places = [one.where for one in report.collectives if one.name in found.collectives] or [
        found.where
    ]
    named = {segment_of(report, where) for where in places}
    return tuple(segment for segment in report.segments if segment in named)
