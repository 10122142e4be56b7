"""A table's slots in a program with several loops over its ticks: each loop takes its own part of
them."""

from __future__ import annotations

import pytest

from sharding_rules.lab import compile as lab
from sharding_rules.lab import hlo
from sharding_rules.lab.ledger import collectives, flops_by_stage
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import Slot
from sharding_rules.lab.targets import TARGETS
from sharding_rules.lab.timeline import replay
from tests.sharding_rules.lab.test_groups import mesh_of

MESH = mesh_of(node=4, pipeline=2, tensor=4)
X = "f32[8,8]{1,0}"
ONE = 2 * 8**3
GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
EMBED, LOSS = Slot("embed", ("1101000", "0000000")), Slot("loss", ("0000000", "0010110"))
"""Of seven ticks: two of forward passes only, four of both, one of backward passes only."""


def branches(name: str) -> str:
    run = (
        f"%run.{name} = {X} dot(%r.{name}, %r.{name}), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}"
    )
    return f"""
%idle_{name} (p.{name}: f32[8,8]) -> f32[8,8] {{
  ROOT %p.{name} = {X} parameter(0)
}}

%work_{name} (r.{name}: f32[8,8]) -> f32[8,8] {{
  %r.{name} = {X} parameter(0)
  {run}
  ROOT %sent.{name} = {X} all-reduce(%run.{name}), {GROUPS}
}}
"""


def choice(name: str, scope: str, operand: str) -> str:
    return (
        f"%{name} = {X} conditional(%n, %{operand}, %{operand}), "
        f"branch_computations={{%idle_{name}, %work_{name}}}, "
        f'metadata={{op_name="jit(step)/while/body/{scope}/cond"}}'
    )


def body(name: str, *scopes: str, hop: bool = True) -> str:
    """The tick of a loop: a conditional for each scope, and a hop."""
    lines, last = [], f"x.{name}"
    for scope in scopes:
        lines.append(choice(f"{scope}_{name}", scope, last).replace("%n,", f"%i.{name},"))
        last = f"{scope}_{name}"
    hops = (
        (
            f"  %hop.{name} = {X} collective-permute(%{last}), "
            "source_target_pairs={{0,4},{4,0}}\n"
        )
        if hop
        else ""
    )
    inside = "".join(branches(f"{scope}_{name}") for scope in scopes)
    return f"""{inside}
%{name} (c.{name}: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %c.{name} = (s32[], {X}) parameter(0)
  %i.{name} = s32[] get-tuple-element(%c.{name}), index=0
  %x.{name} = {X} get-tuple-element(%c.{name}), index=1
{"".join(f"  {line}" + chr(10) for line in lines)}{hops}  ROOT %o.{name} = (s32[], {X}) tuple(%i.{name}, %{f"hop.{name}" if hop else last})
}}
"""


def scan(name: str, trips: int) -> str:
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%loop.{name} = (s32[], {X}) while(%start), condition=%more, body=%{name}, {config}"


def program(*entry: str, blocks: str) -> str:
    lines = "".join(f"  {line}\n" for line in entry)
    return f"""HloModule step, is_scheduled=true
{blocks}
%more (m: (s32[], f32[8,8])) -> pred[] {{
  %m = (s32[], {X}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %a = {X} parameter(0)
  %n = s32[] constant(0)
  %start = (s32[], {X}) tuple(%n, %a)
{lines}  ROOT %out = {X} copy(%a)
}}
"""


def module(*entry: str, blocks: str, slots: tuple[Slot, ...] = (EMBED, LOSS)) -> hlo.Module:
    return hlo.parse(program(*entry, blocks=blocks), slots)


def runs(parsed: hlo.Module) -> dict[str, float]:
    sent = collectives(parsed, Provenance(parsed), MESH)
    return {one.name.removeprefix("sent."): one.times for one in sent if one.kind == "all-reduce"}


THREE = body("fill", "embed") + body("both", "embed", "loss") + body("drain", "loss")


def test_each_of_three_loops_takes_its_own_ticks() -> None:
    parsed = module(scan("fill", 2), scan("both", 4), scan("drain", 1), blocks=THREE)
    assert runs(parsed) == {"embed_fill": 2, "embed_both": 1, "loss_both": 3}, (
        "the last tick has no loss"
    )
    assert flops_by_stage(parsed) == (3 * ONE, 3 * ONE) and list(lab._useless_slots(parsed)) == []
    alone = module(scan("all", 7), blocks=body("all", "embed", "loss"))
    assert flops_by_stage(alone) == flops_by_stage(parsed) and list(lab._useless_slots(alone)) == []


def test_the_timeline_is_the_same_in_one_loop_and_in_three() -> None:
    three = module(scan("fill", 2), scan("both", 4), scan("drain", 1), blocks=THREE)
    one = module(scan("all", 7), blocks=body("all", "embed", "loss"))
    times = []
    for each in (one, three):
        provenance = Provenance(each)
        times.append(replay(each, provenance, collectives(each, provenance, MESH), TARGETS["h100"]))
    assert times[0].step == pytest.approx(times[1].step) and times[0].network == pytest.approx(
        times[1].network
    )


def test_a_loop_without_conditionals_has_its_ticks_too() -> None:
    """Slots that are masked, and neither loss nor embedding: only the sum of the trips shows that
    the loop is one of the table's."""
    blocks = (
        body("fill")
        + body("other", hop=False)
        + body("both", "embed", "loss")
        + body("drain", "loss")
    )
    parsed = module(
        scan("other", 2), scan("fill", 2), scan("both", 4), scan("drain", 1), blocks=blocks
    )
    assert runs(parsed) == {"embed_both": 1, "loss_both": 3}
    assert parsed.windows["loss_both"].begin == 2 and parsed.windows["loss_drain"].end == 7


def test_what_is_left_of_a_loop_of_one_trip() -> None:
    """XLA removes the loop, and leaves the conditional where it was."""
    blocks = (
        branches("embed_0")
        + branches("embed_1")
        + body("both", "embed", "loss")
        + body("drain", "loss")
    )
    first, second = choice("embed_0", "embed", "a"), choice("embed_1", "embed", "embed_0")
    parsed = module(first, second, scan("both", 4), scan("drain", 1), blocks=blocks)
    assert runs(parsed) == {"embed_0": 1, "embed_1": 1, "embed_both": 1, "loss_both": 3}
    idle = (Slot("embed", ("1001000", "0000000")), LOSS)
    parsed = module(first, second, scan("both", 4), scan("drain", 1), blocks=blocks, slots=idle)
    assert "embed_1" not in runs(parsed), "no stage runs it"
    provenance = Provenance(parsed)
    line = replay(parsed, provenance, collectives(parsed, provenance, MESH), TARGETS["h100"])
    assert {"run.embed_0"} == {
        span.name for span in line.spans if span.name.startswith("run.embed")
    } - {"run.embed_both"}


def test_a_removed_loop_has_a_scope_as_often_as_the_others() -> None:
    """A slot that runs the forward pass again looks up tokens twice in each tick."""
    blocks = branches("embed_0") + branches("embed_1") + body("both", "embed")
    again = choice("embed_again", "embed", "embed_both").replace("%n,", "%i.both,")
    blocks = blocks.replace("%hop.both = ", f"{again}\n  %hop.both = ") + branches("embed_again")
    first, second = choice("embed_0", "embed", "a"), choice("embed_1", "embed", "embed_0")
    parsed = module(first, second, scan("both", 6), blocks=blocks, slots=(EMBED,))
    assert list(lab._useless_slots(parsed)) == []
    assert runs(parsed) == {"embed_0": 1, "embed_1": 1, "embed_both": 2, "embed_again": 2}


def test_loops_that_each_run_the_whole_table() -> None:
    parsed = module(
        scan("first", 7),
        scan("second", 7),
        blocks=body("first", "embed", "loss") + body("second", "embed", "loss"),
    )
    assert set(runs(parsed).values()) == {3} and list(lab._useless_slots(parsed)) == []


def test_loops_that_do_not_fit_the_table_are_told_of() -> None:
    parsed = module(scan("fill", 2), scan("both", 3), scan("drain", 1), blocks=THREE)
    assert list(lab._useless_slots(parsed))[:2] == [
        "slot 'embed' has 7 trips, and the loop of embed_fill has 2",
        "slot 'embed' has 7 trips, and the loop of embed_both has 3",
    ]
