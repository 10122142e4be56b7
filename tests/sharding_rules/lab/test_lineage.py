"""Values of a hand-written program, followed back through a loop, tuples and fusions."""

from __future__ import annotations

import pytest

from sharding_rules.lab import hlo
from sharding_rules.lab.lineage import Lineage

PROGRAM = """HloModule m, is_scheduled=true

%three (a: f32[8,4], b: f32[8,4]) -> (bf16[8,4], f32[8,4], f32[8]) {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %cast = bf16[8,4]{1,0} convert(%a)
  %sum = f32[8,4]{1,0} add(%b, %a)
  %made = f32[8]{0} reduce(%b), dimensions={1}
  ROOT %all = (bf16[8,4]{1,0}, f32[8,4]{1,0}, f32[8]{0}) tuple(%cast, %sum, %made)
}

%rows (table: f32[8,4], ids: s32[8]) -> f32[8,4] {
  %table = f32[8,4]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  ROOT %row = f32[8,4]{1,0} gather(%table, %ids)
}

%body (p: (s32[], f32[8,4], f32[8,4])) -> (s32[], f32[8,4], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %total = f32[8,4]{1,0} get-tuple-element(%p), index=2
  %next = f32[8,4]{1,0} add(%total, %w), metadata={op_name="jit(f)/while/body/add"}
  ROOT %out = (s32[], f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%i, %w, %next)
}

ENTRY %main (weight: f32[8,4], x: f32[8,4], tokens: s32[8]) -> f32[8,4] {
  %weight = f32[8,4]{1,0} parameter(0), metadata={op_name="params['w']"}
  %x = f32[8,4]{1,0} parameter(1), metadata={op_name="x"}
  %tokens = s32[8]{0} parameter(2), metadata={op_name="tokens"}
  %zero = s32[] constant(0)
  %turned = f32[8,4]{0,1} copy(%weight)
  %zeros = f32[8,4]{1,0} broadcast(%zero), dimensions={}
  %fused = (bf16[8,4]{1,0}, f32[8,4]{1,0}, f32[8]{0}) fusion(%turned, %x), kind=kLoop, calls=%three
  %start = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%first), dimensions={0}
  %first = bf16[8,4]{1,0} get-tuple-element(%fused), index=0
  %second = f32[8,4]{1,0} get-tuple-element(%fused), index=1
  %third = f32[8]{0} get-tuple-element(%fused), index=2
  %gathered = bf16[16,4]{1,0} all-gather-done(%start)
  %found = f32[8,4]{1,0} fusion(%weight, %tokens), kind=kLoop, calls=%rows
  %init = (s32[], f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%zero, %turned, %zeros)
  ROOT %loop = (s32[], f32[8,4]{1,0}, f32[8,4]{1,0}) while(%init), condition=%cond, body=%body
}
"""


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    return Lineage(hlo.parse(PROGRAM), ["params['w']"])


@pytest.mark.parametrize(
    ("value", "index", "writer"),
    [
        ("loop", (2,), "next"),
        ("p", (2,), "next"),
        ("total", (), "next"),
        ("loop", (1,), "weight"),
        ("w", (), "weight"),
        ("gathered", (), "start"),
    ],
)
def test_what_a_loop_carries_is_written_by_its_body_or_before_it(
    lineage: Lineage, value: str, index: tuple[int, ...], writer: str
) -> None:
    assert lineage.writer(value, index)[0].name == writer


def test_weights_stay_weights_until_anything_else_goes_in(lineage: Lineage) -> None:
    weight = frozenset({"params['w']"})
    for name in ("weight", "turned", "first", "gathered", "w"):
        assert lineage.weights(name) == weight, name
    # summed with others, or looked up by tokens
    for name in ("x", "second", "third", "found", "next", "total"):
        assert lineage.weights(name) is None, name
    assert lineage.weights("zeros") == frozenset()
