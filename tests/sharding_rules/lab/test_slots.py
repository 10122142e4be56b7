"""Conditionals that run in some trips of a loop: a hand-written pipeline of four stages, whose
counts can be added up on paper."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules.lab import compile as lab
from sharding_rules.lab import hlo
from sharding_rules.lab.ledger import collectives, copies, flops_by_phase, flops_by_stage
from sharding_rules.lab.lineage import Lineage
from sharding_rules.lab.provenance import Provenance, read
from sharding_rules.lab.report import LabError, Location, Slot
from tests.sharding_rules.lab.test_groups import mesh_of

MESH = mesh_of(node=4, pipeline=4, tensor=2)
P, M, LAYERS = 4, 8, 3
TICKS = M + 2 * (P - 1)
ONE = 2 * 8**3
"""FLOPs of a matmul."""
SUM = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
SCOPE = "jit(step)/while/body"
X = "f32[8,8]{1,0}"
ROW = "f32[1024,1024]{1,0}"
FORWARD_BRANCH, BACKWARD_BRANCH = (
    f"{SCOPE}/{slot}/cond/branch_1_fun" for slot in ("forward_slot", "backward_slot")
)
PROGRAM = f"""HloModule step, is_scheduled=true

%often (p.1: f32[8,8]) -> f32[8,8] {{
  %p.1 = {X} parameter(0)
  ROOT %exchanged = {X} all-reduce(%p.1), {SUM}
}}

%seldom (p.2: f32[8,8]) -> f32[8,8] {{
  ROOT %p.2 = {X} parameter(0)
}}

%layer (p.3: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %p.3 = (s32[], {X}) parameter(0)
  %i.3 = s32[] get-tuple-element(%p.3), index=0
  %x.3 = {X} get-tuple-element(%p.3), index=1
  %up = {X} dot(%x.3, %x.3), {DOT}, metadata={{op_name="{FORWARD_BRANCH}/layers/while/body/mlp/dot_general"}}
  %summed = {X} all-reduce(%up), {SUM}
  %choice = {X} conditional(%i.3, %summed, %summed), branch_computations={{%seldom, %often}}, \
metadata={{op_name="{FORWARD_BRANCH}/layers/while/body/cond"}}
  ROOT %out.3 = (s32[], {X}) tuple(%i.3, %choice)
}}

%forward (p.4: f32[8,8]) -> f32[8,8] {{
  %p.4 = {X} parameter(0)
  %zero.4 = s32[] constant(0)
  %start.4 = (s32[], {X}) tuple(%zero.4, %p.4)
  %layers.4 = (s32[], {X}) while(%start.4), condition=%seldom, body=%layer, backend_config={{"known_trip_count":{{"n":"{LAYERS}"}}}}
  ROOT %y.4 = {X} get-tuple-element(%layers.4), index=1
}}

%idle (p.5: f32[8,8]) -> f32[8,8] {{
  ROOT %p.5 = {X} parameter(0)
}}

%loss (p.6: f32[8,8]) -> f32[8,8] {{
  %p.6 = {X} parameter(0)
  ROOT %logits = {X} dot(%p.6, %p.6), {DOT}, \
metadata={{op_name="{BACKWARD_BRANCH}/loss/cond/branch_1_fun/jvp(loss)/dot_general"}}
}}

%idle.1 (p.7: f32[8,8]) -> f32[8,8] {{
  ROOT %p.7 = {X} parameter(0)
}}

%backward (p.8: f32[8,8]) -> f32[8,8] {{
  %p.8 = {X} parameter(0)
  %again = {X} dot(%p.8, %p.8), {DOT}, metadata={{op_name="{BACKWARD_BRANCH}/jvp(layers)/mlp/dot_general"}}
  %i.8 = s32[] constant(1)
  %ends = {X} conditional(%i.8, %again, %again), branch_computations={{%idle.1, %loss}}, \
metadata={{op_name="{BACKWARD_BRANCH}/loss/cond"}}
  ROOT %back = {X} dot(%ends, %p.8), {DOT}, \
metadata={{op_name="{BACKWARD_BRANCH}/transpose(jvp(layers))/mlp/dot_general"}}
}}

%idle.2 (p.9: f32[8,8]) -> f32[8,8] {{
  %p.9 = {X} parameter(0)
  ROOT %skipped = {X} all-reduce(%p.9), {SUM}
}}

%tick (p: (s32[], f32[8,8], f32[8,8], f32[1024,1024])) -> (s32[], f32[8,8], f32[8,8], f32[1024,1024]) {{
  %p = (s32[], {X}, {X}, {ROW}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %dx = {X} get-tuple-element(%p), index=1
  %w = {X} get-tuple-element(%p), index=2
  %held = {ROW} get-tuple-element(%p), index=3
  %sent.1 = ({X}, {X}) collective-permute-start(%dx), channel_id=1, \
source_target_pairs={{{{0,6}},{{2,0}},{{4,2}},{{6,4}},{{1,7}},{{3,1}},{{5,3}},{{7,5}}}}, metadata={{op_name="{SCOPE}/ppermute"}}
  %y = {X} conditional(%i, %dx, %w), branch_computations={{%idle, %forward}}, metadata={{op_name="{SCOPE}/forward_slot/cond"}}
  %dy = {X} collective-permute-done(%sent.1)
  %sent.2 = ({X}, {X}) collective-permute-start(%y), channel_id=2, \
source_target_pairs={{{{0,2}},{{2,4}},{{4,6}},{{6,0}},{{1,3}},{{3,5}},{{5,7}},{{7,1}}}}, metadata={{op_name="{SCOPE}/ppermute"}}
  %x = {X} collective-permute-done(%sent.2)
  %new = {X} conditional(%i, %dy, %dy), branch_computations={{%idle.2, %backward}}, metadata={{op_name="{SCOPE}/backward_slot/cond"}}
  %copied = {ROW} copy(%held)
  ROOT %out = (s32[], {X}, {X}, {ROW}) tuple(%i, %new, %w, %copied)
}}

ENTRY %main (weight: f32[8,8], x.0: f32[8,8], large: f32[1024,1024]) -> f32[8,8] {{
  %weight = {X} parameter(0), metadata={{op_name="params['w']"}}
  %x.0 = {X} parameter(1)
  %large = {ROW} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], {X}, {X}, {ROW}) tuple(%zero, %x.0, %weight, %large)
  %loop = (s32[], {X}, {X}, {ROW}) while(%start), condition=%seldom, body=%tick, \
backend_config={{"known_trip_count":{{"n":"{TICKS}"}}}}
  ROOT %result = {X} get-tuple-element(%loop), index=1
}}
"""
t, p = np.arange(TICKS)[:, None], np.arange(P)
FORWARD, BACKWARD = ((m >= 0) & (m < M) for m in (t - p, t - 2 * (P - 1) + p))
SLOTS = (
    # the last stage's is dropped: its backward runs the stage again
    Slot.of("forward_slot", FORWARD & (p < P - 1)),
    Slot.of("backward_slot", BACKWARD),
    Slot.of("backward_slot/loss", BACKWARD & (p == P - 1)),
)
MODULE = hlo.parse(PROGRAM, SLOTS)


def loops(*slots: Slot) -> dict[str, tuple[float, ...]]:
    module = hlo.parse(PROGRAM, slots)
    return {one.name: one.loops for one in collectives(module, Provenance(module), MESH)}


def test_what_runs_in_a_slot_counts_as_often_as_that() -> None:
    always = {"sent.1": (TICKS,), "sent.2": (TICKS,)}
    assert loops() == always | {
        "summed": (TICKS, LAYERS),
        "exchanged": (TICKS, LAYERS),
        "skipped": (TICKS,),
    }, "an upper bound"
    counted = {"summed": (M, LAYERS), "exchanged": (M, LAYERS), "skipped": (TICKS - M,)}
    assert loops(*SLOTS) == always | counted, "the conditional in the layers is none of the slots"
    assert "skipped" not in loops(Slot("backward_slot", ("1" * TICKS,)))


def test_flops_of_each_stage_and_of_the_mean_device() -> None:
    stages = [M * (LAYERS + 2) * ONE] * (P - 1) + [M * (2 + 1) * ONE]
    assert flops_by_stage(MODULE) == tuple(stages)
    phases = {"forward": M * (3 * LAYERS + 1) * ONE // P, "recompute": M * ONE, "backward": M * ONE}
    assert (
        flops_by_phase(MODULE, Provenance(MODULE, VOCABULARY)) == phases
        and sum(phases.values()) == sum(stages) // P
    )
    cheap = f"%p.7 = {X} parameter(0)\n  ROOT %cheap = {X} dot(%p.7, %p.7), {DOT}"
    both = PROGRAM.replace(f"ROOT %p.7 = {X} parameter(0)", cheap)
    assert "%cheap" in both and flops_by_stage(hlo.parse(both)) == (TICKS * (LAYERS + 3) * ONE,), (
        "of unknown branches one"
    )


def test_the_ring_is_along_the_pipeline_and_the_rest_within_a_stage() -> None:
    sent = {one.name: one for one in collectives(MODULE, Provenance(MODULE, VOCABULARY), MESH)}
    for name, phase in (("sent.1", "backward"), ("sent.2", "forward")):
        one = sent.pop(name)
        assert (one.axes, one.nodes, one.partial, one.conditional, one.wire) == (
            ("pipeline",),
            2,
            False,
            False,
            256,
        )
        assert one.where.phase == phase and one.where.part == ""
    assert sent["summed"].where == Location("layers/mlp", "forward", "", "dot_general")
    assert {(one.axes, one.partial, one.conditional) for one in sent.values()} == {
        (("tensor",), False, True)
    }
    behind = {
        one.name: one.flops_hidden_behind
        for one in collectives(MODULE, Provenance(MODULE, VOCABULARY), MESH)
    }
    assert behind["sent.1"] == LAYERS * ONE and behind["sent.2"] == 0


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("forward_slot", "y"), ("backward_slot", "new"), ("loss", "ends"),
        ("backward_slot/loss", "ends"), ("forward_slot/loss", None),
        ("layers", None),
    ],
)  # fmt: skip
def test_a_slot_is_of_the_conditional_directly_in_its_scope(scope: str, name: str | None) -> None:
    module = hlo.parse(PROGRAM, (Slot(scope, ("1" * TICKS,)),))
    found = [
        one.name
        for one in module.by_name.values()
        if one.opcode == "conditional" and module.slot(one)
    ]
    assert found == [name] * (name is not None)


def test_of_several_scopes_the_innermost_counts() -> None:
    wide, narrow = Slot("loss", ("1" * TICKS,)), Slot("backward_slot/loss", ("1" * TICKS,))
    for slots in ((wide, narrow), (narrow, wide)):
        assert hlo.parse(PROGRAM, slots).slot(MODULE.by_name["ends"]) == narrow


def test_phases_of_the_slots() -> None:
    inside = BACKWARD_BRANCH
    paths = {
        f"{FORWARD_BRANCH}/jvp(layers)/mlp/dot": Location("layers/mlp", "forward", "", "dot"),
        f"{FORWARD_BRANCH}/embed/cond/branch_1_fun/embed/dot": Location(
            "embed", "forward", "", "dot"
        ),
        f"{inside}/embed/cond/branch_1_fun/embed/gather": Location(
            "embed", "recompute", "", "gather"
        ),
        f"{inside}/jvp(layers)/while/body/mlp/dot": Location("layers/mlp", "recompute", "", "dot"),
        f"{inside}/transpose(jvp(layers))/checkpoint/rematted_computation/mlp/dot": Location(
            "layers/mlp", "recompute", "", "dot"
        ),
        f"{inside}/transpose(jvp(layers))/while/body/mlp/dot": Location(
            "layers/mlp", "backward", "", "dot"
        ),
        f"{inside}/loss/cond/branch_1_fun/jvp(loss)/dot": Location("loss", "forward", "", "dot"),
        f"{inside}/loss/cond/branch_1_fun/transpose(jvp(loss))/dot": Location(
            "loss", "backward", "", "dot"
        ),
        f"{inside}/add": Location("", "backward", "", "add"),
    }
    assert {path: read(path, VOCABULARY) for path in paths} == paths


def test_whole_arrays_that_are_copied_in_the_loop() -> None:
    (one,) = copies(MODULE, Provenance(MODULE, VOCABULARY))
    assert (one.name, one.shape, one.bytes, one.times) == (
        "copied",
        "f32[1024,1024]",
        1 << 22,
        TICKS,
    )
    handed_on = PROGRAM.replace("tuple(%i, %new, %w, %copied)", "tuple(%i, %new, %w, %held)")
    module = hlo.parse(handed_on, SLOTS)
    assert copies(module, Provenance(module)) == (), (
        "of what never changes a copy is a layout, not a loss"
    )


def test_a_value_is_followed_into_the_branch_that_runs() -> None:
    lineage = Lineage(MODULE, ["params['w']"])
    assert lineage.writer("new")[0].name == "back"
    assert lineage.writer("p.4")[0].name == "weight" and lineage.weights("p.4") == {"params['w']"}


def test_a_slot_that_counts_nothing_is_told_of() -> None:
    assert list(lab._useless_slots(MODULE)) == []
    typo, short = Slot("forwards_slot", ("1" * TICKS,)), Slot("backward_slot", ("101",))
    assert list(lab._useless_slots(hlo.parse(PROGRAM, (typo, short)))) == [
        "slot 'backward_slot' has 3 trips, and the loop of new has 14",
        "slot 'forwards_slot' fits no conditional in a loop, and counts nothing",
    ]


def test_slots_are_of_the_same_stages() -> None:
    with pytest.raises(LabError, match="slots with different numbers of stages: a 1, b 2"):
        lab.compile_report(len, mesh=MESH, slots=(Slot("a", ("1",)), Slot("b", ("1", "0"))))


@pytest.mark.parametrize("stages", [(), ("101", "10"), ("1x",)])
def test_what_is_no_slot(stages: tuple[str, ...]) -> None:
    with pytest.raises(
        LabError, match="slot 'f' needs for each stage a text of equal length, of 0 and 1, not"
    ):
        Slot("f", stages)
