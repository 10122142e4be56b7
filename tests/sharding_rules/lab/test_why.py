"""Why one program is predicted to be slower than another, in a sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import lab_report

from sharding_rules.lab.report import Report
from sharding_rules.lab.why import why

BASE = lab_report.report()


def with_step(
    *, compute: float = 0.0, waits: float = 0.0, name: str = "changed", **changes: Any
) -> Report:
    """Returns the report with as many more seconds of compute, and of waiting for the sums over
    data."""
    line = BASE.timeline
    assert line
    longer = dataclasses.replace(
        line,
        step=line.step + 1e6 * (compute + waits),
        compute=line.compute + 1e6 * compute,
        exposed=line.exposed + 1e6 * waits,
    )
    collectives = tuple(
        dataclasses.replace(one, exposed=one.exposed + 1e6 * waits, wire=2 * one.wire)
        if waits and one.payload == 5 * lab_report.GIB
        else one
        for one in BASE.collectives
    )
    return dataclasses.replace(BASE, name=name, timeline=longer, collectives=collectives, **changes)


def test_more_matmuls() -> None:
    flops = BASE.flops | {"recompute": BASE.flops["recompute"] + 90_000 * 10**9}
    slower = with_step(compute=1.5, flops=flops)
    said = (
        "changed takes 1.25 x as long as gpt_175b, 7.51 s for 6.01 s a step (predicted, never "
        "measured): it computes 1.5 s longer, with 90.0 TFLOP more in recompute (100 % of the "
        "difference)"
    )
    assert why(slower, BASE) == why(BASE, slower) == said
    assert "for as many FLOPs" in why(with_step(compute=1.5), BASE)


def test_more_waiting() -> None:
    assert why(BASE, with_step(waits=2.0)).partition(": ")[2] == (
        "waits 2 s longer for data, which sends 8.75 GiB more (100 % of the difference)"
    )


def test_what_is_shorter_is_said() -> None:
    said = why(with_step(compute=-0.5, waits=2.0), BASE)
    assert (
        "waits 2 s longer for data" in said
        and said.endswith("; other parts are 500 ms shorter")
        and "computes" not in said
    )


def test_equal_and_unknown_times() -> None:
    assert why(BASE, with_step(compute=0.01)).startswith(
        "changed and gpt_175b take the same time: 6.02 s a step (predicted"
    )
    assert "no times are predicted" in why(BASE, dataclasses.replace(BASE, timeline=None))
    assert why(with_step(compute=1.5, name=BASE.name), BASE).startswith(
        "this takes 1.25 x as long as the other"
    )
