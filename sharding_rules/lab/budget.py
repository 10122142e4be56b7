"""Limits for what a step sends, waits for and needs: assertions for tests, on a compiled program's
report.
"""

from __future__ import annotations

from sharding_rules.lab.report import Collective, LabError, Report, location_text


def assert_budget(report: Report, *, peak_bytes: int | None = None, **wire_bytes: float) -> None:
    """Raises LabError where a step sends more bytes along a mesh axis, or needs more memory, than
    allowed: fsdp=40e9, peak_bytes=72e9.

    A mesh axis that is not named is not limited.
    """
    _check_axes(report, set(wire_bytes))
    over = []
    for axis, limit in wire_bytes.items():
        if (sent := report.wire_bytes(axis)) > limit:
            largest = sorted(report.select(axis=axis), key=lambda one: -one.times * one.wire)[:3]
            lines = [
                (
                    f"\n      {one.times} x {one.kind} of {' '.join(one.shapes)} in "
                    f"{location_text(one.where)}"
                )
                for one in largest
            ]
            over.append(
                f"{axis}: {sent:.4g} bytes sent, {limit:.4g} allowed; most of them "
                f"by{''.join(lines)}"
            )
    if peak_bytes is not None and report.peak_bytes > peak_bytes:
        over.append(f"memory: {report.peak_bytes} bytes at the peak, {peak_bytes} allowed")
    if over:
        raise LabError(
            f"{report.name} is over its budget\n" + "\n".join(f"  - {line}" for line in over)
        )


def assert_exposed(report: Report, *, step: float | None = None, **shares: float) -> None:
    """Raises LabError where compute waits longer for collectives along a mesh axis than this share
    of the predicted step.

    `assert_exposed(report, data=0.02, tensor=0.1)`. A collective along several axes counts for each
    of them; an axis that is not named is not limited. The share of bytes that are sent beside a
    matmul would flatter a program that waits for most of each collective.

    Args:
      step: the limit for all collectives together.
    """
    _check_axes(report, set(shares))
    line = report.timeline
    if line is None or line.step <= 0:
        raise LabError(f"{report.name} has no timeline: compile it for a target of the lab")
    limits = {axis: (limit, list(report.select(axis=axis))) for axis, limit in shares.items()}
    waits = {axis: sum(one.exposed for one in along) for axis, (_, along) in limits.items()}
    if step is not None:
        limits["step"], waits["step"] = (step, list(report.collectives)), line.exposed
    over = []
    for name, (limit, along) in limits.items():
        if waits[name] > limit * line.step:
            lines = "".join(
                f"\n      {_waited(one, line.step)}"
                for one in sorted(along, key=lambda one: -one.exposed)[:3]
                if one.exposed
            )
            over.append(
                f"{name}: {waits[name] / line.step:.1%} of the step exposed, {limit:.1%} allowed; "
                f"most of it for{lines}"
            )
    if over:
        raise LabError(
            f"{report.name} waits longer than allowed\n" + "\n".join(f"  - {line}" for line in over)
        )


def _waited(one: Collective, step: float) -> str:
    return (
        f"{one.times} x {one.kind} of {' '.join(one.shapes)}, {one.exposed / step:.1%}, in "
        f"{location_text(one.where)}"
    )


def _check_axes(report: Report, axes: set[str]) -> None:
    if unknown := axes - report.mesh.keys():
        raise LabError(
            f"no mesh axis {', '.join(sorted(unknown))}; the mesh has {', '.join(report.mesh)}"
        )
