"""Findings of pipelined programs, planted into a report that is made by hand; and that a lawful
pipeline has none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sharding_rules import preset
from sharding_rules.lab.lint import Finding, lint
from sharding_rules.lab.report import Argument, Copy, Location, Report, Slot, Timeline
from tests.sharding_rules.lab import test_lint as flat
from tests.sharding_rules.lab.test_lint import AXES, LAYER, B, D, F, M, S, V, collective, only

P, TICKS = 2, M + 2
RULES = preset("hsdp+megatron")
MESH = flat.MESH | {"pipeline": P}
SLOTS = (
    Slot("forward_slot", ("1" * M + "00", "0" + "1" * M + "0")),
    Slot("backward_slot", ("00" + "1" * M, "0" + "1" * M + "0")),
)
IN_STAGE = (M, flat.L // P)
HOP = collective(
    "collective-permute",
    "data",
    f"bf16[4,{S},{D}]",
    axes=("pipeline",),
    loops=(TICKS,),
    where=Location(),
)
BACK = Location("layers/mlp", "backward", "model.py:3")
GATHER = collective("all-gather", "fsdp", f"bf16[{D},{F // 4}]", loops=IN_STAGE, conditional=True)
LAWFUL = (
    HOP,
    dataclasses.replace(HOP, name="back"),
    collective("all-reduce", "tensor", f"bf16[4,{S},{D}]", loops=IN_STAGE, conditional=True),
    GATHER,
    dataclasses.replace(GATHER, where=Location("layers/mlp", "recompute", "model.py:10")),
    # the backward slot runs the stage again, and then goes back through it
    dataclasses.replace(GATHER, where=BACK),
    collective(
        "reduce-scatter",
        "fsdp",
        f"bf16[{D},{F // 4}]",
        loops=IN_STAGE,
        conditional=True,
        where=BACK,
    ),
    collective("all-reduce", "data", "f32[4000000]", loops=(), where=BACK, nodes=2),
)


def arguments() -> tuple[Argument, ...]:
    """Those of the flat step, layers cut by stage too."""
    return tuple(
        dataclasses.replace(a, axes=("pipeline", *a.axes), bytes=a.bytes // P)
        if "blocks" in a.name
        else a
        for a in flat.arguments()
    )


def report(*more: Any, **changes: Any) -> Report:
    known = {
        "mesh": MESH,
        "axis_nodes": {**dict.fromkeys(MESH, 1), "pipeline": 2, "data": 2},
        "collectives": (*LAWFUL, *more),
    }
    return flat.report(
        **{
            **known,
            "arguments": arguments(),
            "slots": SLOTS,
            "timeline": Timeline(1e5, 1e5, 0, 0, ()),
        }
        | changes
    )


def findings(*more: Any, **changes: Any) -> tuple[Finding, ...]:
    return lint(report(*more, **changes), RULES, AXES)


@pytest.mark.parametrize("axes", [AXES, None])
def test_a_lawful_pipeline_is_clean(axes: Any) -> None:
    """Weights of a stage are gathered in every slot, the embedding is replicated on every stage,
    the ring lies beside the slots."""
    assert lint(report(), RULES if axes else None, axes) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"kind": "collective-permute", "axes": ("sequence",)},
            "collective-permute of bf16[4,512,1024] over sequence in a branch",
        ),
        (
            {"kind": "all-reduce", "axes": ("pipeline", "data")},
            "over pipeline and data in a branch: its groups span stages",
        ),
    ],
)
def test_a_collective_in_a_branch_waits_for_ever(changes: dict[str, Any], text: str) -> None:
    one = dataclasses.replace(HOP, loops=(M,), conditional=True, wire=1.0, **changes)
    found = only(findings(one))
    assert (
        (found.check, found.severity) == ("branch-collective", "error")
        and text in found.text
        and "run both branches" in found.fix
    )
    outside = dataclasses.replace(one, conditional=False)
    assert findings(outside) == ()
    alone = flat.report(one)
    assert "branch-collective" not in {each.check for each in lint(alone, RULES, AXES)}, (
        "all devices take the same branch"
    )


def test_a_hop_with_nothing_beside_it() -> None:
    found = only(findings(dataclasses.replace(HOP, flops_hidden_behind=0)))
    assert (found.check, found.severity, found.bytes) == (
        "exposed-hop",
        "notice",
        int(TICKS * HOP.wire),
    )
    assert f"in each of {TICKS} ticks" in found.text and "--flags=pipeline" in found.fix


def test_a_stash_that_is_copied_whole() -> None:
    stash, x = (
        Copy("copy.1", shape, size, (TICKS,), BACK)
        for shape, size in ((f"bf16[3,4,{S},{D}]", 10**9), (HOP.shapes[0], 10**9))
    )
    found = only(findings(copies=(stash, stash, x)))
    assert (found.check, found.bytes) == (
        "whole-copy",
        4 * TICKS * 10**9,
    ) and f"copied whole {2 * TICKS} times" in found.text
    assert findings(copies=(stash,), timeline=Timeline(1e9, 1e9, 0, 0, ())) == (), (
        "less than a hundredth of the step"
    )


def test_a_third_gather_in_the_backward() -> None:
    found = only(findings(dataclasses.replace(GATHER, where=BACK)))
    assert (
        found.check == "gathered-twice"
        and "gathered 12 times over fsdp in the backward, 10 would do" in found.text
    )
    again = only(findings(GATHER))
    assert "gathered 8 times over fsdp in the forward, 5 would do" in again.text, (
        "of the layers of one stage"
    )


def test_idle_stages_gather_too() -> None:
    """Each of the M + P - 1 ticks of a slot gathers, whether its stage has work or not; one tick
    more is a finding."""

    def ticks(n: int) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(one, loops=(n, flat.L // P), conditional=False)
            if one.kind == "all-gather"
            else one
            for one in LAWFUL
        )

    assert findings(collectives=ticks(M + P - 1)) == ()
    found = findings(collectives=ticks(M + P))
    assert {one.check for one in found} == {"gathered-twice"}
    assert (
        "6 times over fsdp in the forward, 5 would do; 12 times over fsdp in the backward, 10 "
        "would do"
    ) in only(found).text


@pytest.mark.parametrize("loops", [(TICKS,), (M, 1)])
def test_a_reduction_in_each_tick(loops: tuple[int, ...]) -> None:
    each = collective("all-reduce", "data", f"f32[{3 * D * D}]", loops=loops, where=BACK)
    assert only(findings(each)).check == "microbatch-reduction"


def test_a_sum_over_stages_and_replicas() -> None:
    """Of the gradients that every stage has, and of no more: no rule shards a table along the
    pipeline."""
    tables = collective(
        "all-reduce",
        "fsdp",
        f"f32[{V * D // 4}]",
        axes=("pipeline", "fsdp"),
        loops=(),
        where=BACK,
        by_hand=True,
    )
    assert findings(tables) == ()
    assert (
        only(findings(dataclasses.replace(tables, axes=("fsdp",)))).check == "all-reduce-of-shards"
    ), "fsdp shards them"
    more = dataclasses.replace(tables, shapes=(f"f32[{V * D // 2}]",))
    found = only(findings(more))
    assert found.check == "all-reduce-of-shards" and found.bytes == pytest.approx(
        more.wire / 2, rel=0.01
    )


def test_an_idle_pipeline() -> None:
    found = findings(collectives=LAWFUL[2:])
    assert "only stores" in only(found).text and "mesh.pipeline=1" in only(found).fix


def test_a_slot_that_counts_nothing() -> None:
    found = only(
        findings(
            warnings=("slot 'forwards_slot' fits no conditional in a loop, and counts nothing",)
        )
    )
    assert (found.check, found.severity) == ("slot", "notice")


def test_a_report_keeps_what_was_known() -> None:
    kept = report(copies=(Copy("c", "f32[2]", 8, (3, 4), LAYER),), stage_flops=(1, 2))
    assert Report.from_json(kept.to_json()) == kept and (B, V) == (16, 32768)
