"""Limits for what a step sends, waits for and needs.

Assertions for tests, on a compiled program's report.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharding_rules.lab.report import Collective, LabError, Report, location_text

# Collectives that a message names, of those along an axis that is over its limit.
_MAX_LISTED = 3


def assert_budget(
    report: Report,
    *,
    peak_bytes: int | None = None,
    host_bytes: int | None = None,
    **wire_bytes: float,
) -> None:
    """Raises LabError where a step sends more bytes along a mesh axis than allowed.

    Also where it needs more memory: `assert_budget(report, fsdp=40e9, peak_bytes=72e9)`. A mesh
    axis that is not named is not limited. host_bytes: of the host's memory, for each device.
    """
    _check_axes(report, set(wire_bytes))
    problems = []
    for axis, limit in wire_bytes.items():
        sent = report.wire_bytes(axis)
        if sent <= limit:
            continue
        collectives = sorted(report.select(axis=axis), key=lambda one: -one.times * one.wire)
        lines = [
            f"\n      {_in_words(collective)} in {location_text(collective.where)}"
            for collective in collectives[:_MAX_LISTED]
        ]
        problems.append(
            f"{axis}: {sent:.4g} bytes sent, {limit:.4g} allowed; most of them by{''.join(lines)}"
        )
    if peak_bytes is not None and report.peak_bytes > peak_bytes:
        problems.append(f"memory: {report.peak_bytes} bytes at the peak, {peak_bytes} allowed")
    if host_bytes is not None and report.host_bytes > host_bytes:
        problems.append(f"host memory: {report.host_bytes} bytes a device, {host_bytes} allowed")
    if problems:
        raise LabError(f"{report.name} is over its budget\n{_bullets(problems)}")


def assert_exposed(report: Report, *, step: float | None = None, **shares: float) -> None:
    """Raises LabError where compute waits longer for collectives along a mesh axis than allowed.

    Limits are shares of the predicted step: `assert_exposed(report, data=0.02, tensor=0.1)`. A
    collective along several axes counts for each of them; an axis that is not named is not limited.
    The share of bytes that are sent beside a matmul would flatter a program that waits for most of
    each collective.

    Args:
      report: of a program that was compiled for a target of the lab; another has no timeline.
      step: the limit for all collectives together.
    """
    _check_axes(report, set(shares))
    timeline = report.timeline
    if timeline is None or timeline.step <= 0:
        raise LabError(f"{report.name} has no timeline: compile it for a target of the lab")
    problems = []
    for axis, limit in shares.items():
        collectives = list(report.select(axis=axis))
        exposed = sum(collective.exposed for collective in collectives)
        if exposed > limit * timeline.step:
            problems.append(_too_exposed(axis, exposed, limit, timeline.step, collectives))
    if step is not None and timeline.exposed > step * timeline.step:
        problems.append(
            _too_exposed("step", timeline.exposed, step, timeline.step, report.collectives)
        )
    if problems:
        raise LabError(f"{report.name} waits longer than allowed\n{_bullets(problems)}")


def _too_exposed(
    name: str, exposed: float, limit: float, step: float, collectives: Sequence[Collective]
) -> str:
    longest = sorted(collectives, key=lambda collective: -collective.exposed)[:_MAX_LISTED]
    lines = [
        f"\n      {_in_words(collective)}, {collective.exposed / step:.1%}, in "
        f"{location_text(collective.where)}"
        for collective in longest
        if collective.exposed
    ]
    return (
        f"{name}: {exposed / step:.1%} of the step exposed, {limit:.1%} allowed; "
        f"most of it for{''.join(lines)}"
    )


def _in_words(collective: Collective) -> str:
    return f"{collective.times:.10g} x {collective.kind} of {' '.join(collective.shapes)}"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"  - {line}" for line in lines)


def _check_axes(report: Report, axes: set[str]) -> None:
    unknown = axes - report.mesh.keys()
    if unknown:
        raise LabError(
            f"no mesh axis {', '.join(sorted(unknown))}; the mesh has {', '.join(report.mesh)}"
        )
