"""Queries about a loop over layers, on a hand-written program that keeps every rule and on copies
of it that each break one."""

from __future__ import annotations

import pytest

from sharding_rules.lab import hlo
from sharding_rules.lab.structure import (
    adds_to_gradients,
    casts_of_weights,
    slices_of_layers,
    transposes_around,
)

WEIGHTS = {"up": (64, 16), "qkv": (16, 3, 4, 8)}
UP, SUMS = "bf16[6,64,16]{2,1,0}", "f32[6,64,16]{2,1,0}"
CARRIED = f"(s32[], {UP}, {SUMS}, f32[6,16,3,32]{{3,2,1,0}}, bf16[8,16]{{1,0}})"
TWO = "replica_groups={{0,1},{2,3}}, dimensions={0}, channel_id=1, use_global_device_ids=true"
PROGRAM = f"""HloModule step, is_scheduled=true

%one_row (a.1: bf16[6,64,16], i.1: s32[]) -> bf16[1,64,16] {{
  %a.1 = {UP} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %row = bf16[1,64,16]{{2,1,0}} dynamic-slice(%a.1, %i.1, %zero.1, %zero.1), dynamic_slice_sizes={{1,64,16}}
}}

%add_up (sums.2: f32[6,64,16], i.2: s32[], dw.2: bf16[64,16]) -> f32[6,64,16] {{
  %sums.2 = {SUMS} parameter(0)
  %i.2 = s32[] parameter(1)
  %dw.2 = bf16[64,16]{{1,0}} parameter(2)
  %zero.2 = s32[] constant(0)
  %held.2 = f32[1,64,16]{{2,1,0}} dynamic-slice(%sums.2, %i.2, %zero.2, %zero.2), dynamic_slice_sizes={{1,64,16}}
  %wide.2 = f32[64,16]{{1,0}} convert(%dw.2)
  %view.2 = f32[1,64,16]{{2,1,0}} bitcast(%wide.2)
  %more.2 = f32[1,64,16]{{2,1,0}} add(%held.2, %view.2)
  ROOT %added.2 = {SUMS} dynamic-update-slice(%sums.2, %more.2, %i.2, %zero.2, %zero.2)
}}

%add_qkv (sums.3: f32[6,16,3,32], i.3: s32[], dw.3: f32[16,96]) -> f32[6,16,3,32] {{
  %sums.3 = f32[6,16,3,32]{{3,2,1,0}} parameter(0)
  %i.3 = s32[] parameter(1)
  %dw.3 = f32[16,96]{{1,0}} parameter(2)
  %zero.3 = s32[] constant(0)
  %view.3 = f32[6,16,96]{{2,1,0}} bitcast(%sums.3)
  %held.3 = f32[1,16,96]{{2,1,0}} dynamic-slice(%view.3, %i.3, %zero.3, %zero.3), dynamic_slice_sizes={{1,16,96}}
  %new.3 = f32[1,16,96]{{2,1,0}} bitcast(%dw.3)
  %more.3 = f32[1,16,96]{{2,1,0}} add(%held.3, %new.3)
  %row.3 = f32[1,16,3,32]{{3,2,1,0}} bitcast(%more.3)
  ROOT %added.3 = f32[6,16,3,32]{{3,2,1,0}} dynamic-update-slice(%sums.3, %row.3, %i.3, %zero.3, %zero.3, %zero.3)
}}

%norm (x.4: bf16[8,16]) -> bf16[8,16] {{
  %x.4 = bf16[8,16]{{1,0}} parameter(0)
  ROOT %scaled = bf16[8,16]{{1,0}} negate(%x.4)
}}

%layer (p: {CARRIED}) -> {CARRIED} {{
  %p = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = {UP} get-tuple-element(%p), index=1
  %sums = {SUMS} get-tuple-element(%p), index=2
  %qkv = f32[6,16,3,32]{{3,2,1,0}} get-tuple-element(%p), index=3
  %x = bf16[8,16]{{1,0}} get-tuple-element(%p), index=4
  %used = bf16[1,64,16]{{2,1,0}} fusion(%w, %i), kind=kLoop, calls=%one_row
  %view = bf16[64,16]{{1,0}} bitcast(%used)
  %entered = bf16[8,16]{{1,0}} fusion(%x), kind=kLoop, calls=%norm
  %gather = (bf16[8,16]{{1,0}}, bf16[16,16]{{1,0}}) all-gather-start(%entered), {TWO}
  %whole = bf16[16,16]{{1,0}} all-gather-done(%gather)
  %y = bf16[16,64]{{1,0}} dot(%whole, %view), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %dw = bf16[64,16]{{1,0}} dot(%y, %whole), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  %dqkv = f32[16,96]{{1,0}} dot(%y, %y), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  %sums_up = {SUMS} fusion(%sums, %i, %dw), kind=kLoop, calls=%add_up
  %sums_qkv = f32[6,16,3,32]{{3,2,1,0}} fusion(%qkv, %i, %dqkv), kind=kLoop, calls=%add_qkv
  ROOT %out = {CARRIED} tuple(%i, %w, %sums_up, %sums_qkv, %x)
}}

%more (q: {CARRIED}) -> pred[] {{
  %q = {CARRIED} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (weights: bf16[6,64,16], grads: f32[6,64,16], others: f32[6,16,3,32], x.0: bf16[8,16]) -> f32[6,64,16] {{
  %weights = {UP} parameter(0)
  %grads = {SUMS} parameter(1)
  %others = f32[6,16,3,32]{{3,2,1,0}} parameter(2)
  %x.0 = bf16[8,16]{{1,0}} parameter(3)
  %zero = s32[] constant(0)
  %start = {CARRIED} tuple(%zero, %weights, %grads, %others, %x.0)
  %layers = {CARRIED} while(%start), condition=%more, body=%layer, backend_config={{"known_trip_count":{{"n":"6"}}}}
  ROOT %result = {SUMS} get-tuple-element(%layers), index=2
}}
"""


def planted(*changes: tuple[str, str]) -> hlo.Module:
    text = PROGRAM
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return hlo.parse(text)


GOOD = planted()
TWO_ROWS = (
    ("-> bf16[1,64,16] {", "-> bf16[2,64,16] {"),
    (
        (
            "ROOT %row = bf16[1,64,16]{2,1,0} dynamic-slice(%a.1, %i.1, %zero.1, %zero.1), "
            "dynamic_slice_sizes={1,64,16}"
        ),
        (
            "ROOT %row = bf16[2,64,16]{2,1,0} dynamic-slice(%a.1, %i.1, %zero.1, %zero.1), "
            "dynamic_slice_sizes={2,64,16}"
        ),
    ),
)
F32_WEIGHTS = tuple(
    (before, before.replace("bf16[6", "f32[6"))
    for before in ("%weights = bf16[6", "%w = bf16[6", "%a.1 = bf16[6")
)
CAST_ROW = (
    (
        "ROOT %row = bf16[1,64,16]{2,1,0} dynamic-slice(%a.1, %i.1, %zero.1, %zero.1), "
        "dynamic_slice_sizes={1,64,16}"
    ),
    "%row = f32[1,64,16]{2,1,0} dynamic-slice(%a.1, %i.1, %zero.1, %zero.1), "
    "dynamic_slice_sizes={1,64,16}\n"
    "  ROOT %cast = bf16[1,64,16]{2,1,0} convert(%row)",
)


def test_a_program_that_keeps_every_rule() -> None:
    assert slices_of_layers(GOOD, WEIGHTS) == []
    assert casts_of_weights(GOOD, WEIGHTS) == [], (
        "the gradient's cast in %add_up is none of a weight"
    )
    assert transposes_around(GOOD) == []
    assert adds_to_gradients(GOOD, WEIGHTS) == []


def test_a_slice_of_several_layers() -> None:
    (found,) = slices_of_layers(planted(*TWO_ROWS), WEIGHTS)
    assert found.startswith("row takes 2 layers of up: bf16[2,64,16]")
    assert slices_of_layers(planted(*TWO_ROWS), {"qkv": WEIGHTS["qkv"]}) == [], "of another array"


def test_a_cast_of_a_weight() -> None:
    """In the fusion that takes the row; or, of the whole stack, beside it."""
    (found,) = casts_of_weights(planted(*F32_WEIGHTS, CAST_ROW), WEIGHTS)
    assert found.startswith("cast casts up to bf16[1,64,16]")
    whole = ("  %used = ", f"  %all = {UP} convert(%w)\n  %used = ")
    (found,) = casts_of_weights(planted(whole), WEIGHTS)
    assert found.startswith("all casts up to bf16[6,64,16]")


def test_a_cast_outside_of_the_loop_is_none() -> None:
    module = planted(
        (
            "  %zero = s32[] constant(0)\n  %start",
            f"  %once = {UP} convert(%weights)\n  %zero = s32[] constant(0)\n  %start",
        )
    )
    assert casts_of_weights(module, WEIGHTS) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            (
                "ROOT %scaled = bf16[8,16]{1,0} negate(%x.4)",
                "ROOT %t = bf16[8,16]{1,0} transpose(%x.4), dimensions={1,0}",
            ),
            "entered",
        ),
        (
            (
                "  %y = bf16[16,64]{1,0} dot(%whole, %view)",
                "  %c = bf16[16,16]{0,1} copy(%whole)\n  %y = bf16[16,64]{1,0} dot(%c, %view)",
            ),
            "c transposes bf16[16,16] after gather",
        ),
    ],
)
def test_a_transpose_beside_a_gather(change: tuple[str, str], expected: str) -> None:
    (found,) = transposes_around(planted(change))
    assert found.startswith(expected)
    assert (
        transposes_around(planted(change), ["gather"]) == [found]
        and transposes_around(planted(change), ["another"]) == []
    )


def test_a_copy_in_the_same_order_is_no_transpose() -> None:
    same = "  %c = bf16[16,16]{1,0} copy(%whole)\n  %y = bf16[16,64]{1,0} dot(%c, %view)"
    assert transposes_around(planted(("  %y = bf16[16,64]{1,0} dot(%whole, %view)", same))) == []


def test_a_gradient_that_is_added_twice_or_not_at_all() -> None:
    twice = ("tuple(%i, %w, %sums_up,", "tuple(%i, %w, %again,")
    again = (
        "  %sums_qkv = ",
        f"  %again = {SUMS} fusion(%sums_up, %i, %dw), kind=kLoop, calls=%add_up\n  %sums_qkv = ",
    )
    assert adds_to_gradients(planted(twice, again), WEIGHTS) == [
        "2 additions in place to up in layer, not 1"
    ]
    missing = planted(("fusion(%qkv, %i, %dqkv), kind=kLoop, calls=%add_qkv", "negate(%qkv)"))
    assert adds_to_gradients(missing, WEIGHTS) == ["0 additions in place to qkv in layer, not 1"]


def test_a_gradient_that_is_added_as_a_whole() -> None:
    """Zeros with one row, added to all rows."""
    whole = (
        "ROOT %added.2 = ",
        f"%n.2 = {SUMS} negate(%sums.2)\n  %all.2 = {SUMS} add(%n.2, %sums.2)\n  ROOT %added.2 = ",
    )
    found = adds_to_gradients(planted(whole), WEIGHTS)
    assert len(found) == 1 and found[0].startswith("all.2 adds 6 layers of up at once")


def test_a_row_that_another_kernel_has_added() -> None:
    apart = (
        ("%more.2 = f32[1,64,16]{2,1,0} add(%held.2, %view.2)", "%more.2 = f32[1,64,16]{2,1,0} negate(%view.2)"),
    )  # fmt: skip
    found = adds_to_gradients(planted(*apart), WEIGHTS)
    assert found[0].startswith("added.2 writes a row of up that another kernel has added")
    assert found[1] == "0 additions in place to up in layer, not 1"


def test_a_program_without_additions() -> None:
    module = planted(("%more.2 = f32[1,64,16]{2,1,0} add(", "%more.2 = f32[1,64,16]{2,1,0} multiply("),
                     ("%more.3 = f32[1,16,96]{2,1,0} add(", "%more.3 = f32[1,16,96]{2,1,0} multiply("))  # fmt: skip
    assert (
        adds_to_gradients(module, WEIGHTS)[-1]
        == "no loop adds in place to the gradients of up, qkv"
    )
