"""The text of compiled programs as data: cuts of gpt_175b's step as two versions of XLA print it,
and a program of every construct."""

from pathlib import Path

import pytest

from sharding_rules.lab import hlo

CUTS = {
    version: hlo.parse(
        (Path(__file__).parent / f"hlo/gpt_jax_{version}.txt").read_text(encoding="utf-8")
    )
    for version in ("0.10.2", "0.11.2")
}

PROGRAM = """HloModule jit_f, is_scheduled=true

%product (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  ROOT %dot = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], /*index=1*/f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %fused = f32[4,2]{1,0} fusion(%x, %x), kind=kLoop, calls=%product, metadata={op_name="jit(f)/state[\\'w\\']/dot_general"}
  ROOT %again = (s32[], f32[4,8]{1,0}) tuple(%x, /*index=1*/%x)
}

%seldom (q: f32[4,8]) -> f32[4,8] {
  ROOT %q = f32[4,8]{1,0} parameter(0)
}

ENTRY %main (argument: f32[4,8]) -> f32[4,8] {
  %argument = f32[4,8]{1,0:T(8,128)} parameter(0)
  %start = (s32[], f32[4,8]{1,0}) tuple(%argument, %argument)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%seldom, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %gemm = (f8e4m3fn[4,4]{1,0}, s8[32]{0}) custom-call(%argument), custom_call_target="__cublas$lt$matmul$f8", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %either = f32[4,8]{1,0} conditional(%argument, %argument, %argument), branch_computations={%seldom, %body}
}
"""


def test_arrays_of_a_nested_tuple() -> None:
    assert [str(a) for a in hlo.arrays("((bf16[1,2048]{1,0:T(8)}, f32[]), s4[3]{0}, token[])")] == [
        "bf16[1,2048]",
        "f32[]",
        "s4[3]",
        "token[]",
    ]
    assert [
        a.bytes for a in hlo.arrays("((bf16[1,2048]{1,0}, f32[]), s4[3]{0}, f8e5m2[7], token[])")
    ] == [4096, 4, 2, 7, 0]


def test_a_program() -> None:
    module = hlo.parse(PROGRAM)
    assert module.entry == "main" and set(module.computations) == {
        "product",
        "body",
        "seldom",
        "main",
    }
    fused = module.by_name["fused"]
    assert (fused.opcode, fused.operands, fused.called, fused.index) == (
        "fusion",
        ("x", "x"),
        ("product",),
        2,
    )
    assert fused.op_name == "jit(f)/state['w']/dot_general"
    assert module.by_name["b"].arguments == "1" and module.by_name["again"].operands == ("x", "x")
    loop = module.by_name["loop"]
    assert (loop.body, loop.trips, loop.bytes) == ("body", 5, 132)
    assert module.by_name["either"].branches == ("seldom", "body")


def test_visits() -> None:
    visits = [(v.computation, v.loops, v.conditional, v.fused) for v in hlo.parse(PROGRAM).visits()]
    assert visits == [
        ("main", (), False, False),
        ("seldom", (6,), False, False),  # the condition of the loop: once more than its body
        ("body", (5,), False, False),
        ("product", (5,), False, True),
        ("seldom", (), True, False),
        ("body", (), True, False),
        ("product", (), True, True),
    ]


def test_flops() -> None:
    module = hlo.parse(PROGRAM)
    once = 2 * 4 * 2 * 8
    assert [module.flops(module.by_name[name]) for name in ("dot", "fused", "loop", "either")] == [
        once,
        once,
        5 * once,
        once,
    ]
    assert module.flops(module.by_name["gemm"]) == 2 * (4 * 4) * 8, (
        "of the product alone, not of the workspace behind it"
    )


def test_a_fusion_that_starts_here_and_ends_elsewhere() -> None:
    """XLA of jax 0.12 writes some fusions so."""
    at_once, started = (
        "%fused = f32[4,2]{1,0} fusion(",
        "%fused = ((f32[4,8]{1,0}), f32[4,2]{1,0}, u32[]) fusion-start(",
    )
    text = PROGRAM.replace(at_once, started)
    assert text != PROGRAM
    whole, asynchronous = hlo.parse(PROGRAM), hlo.parse(text)
    assert [*asynchronous.visits()] == [*whole.visits()]
    assert asynchronous.total_flops("body") == whole.total_flops("body") > 0


@pytest.mark.parametrize("version", CUTS)
def test_stacks(version: str) -> None:
    module = CUTS[version]
    stack = list(module.stack(module.by_name["reduce-scatter-start.5"]))
    assert stack[0].startswith("/home/me/mesh_lm/model/layers.py:") and stack[-1].startswith(
        "/home/me/run.py:"
    )
    assert (
        list(
            module.stack(
                module.by_name[
                    "wrapped_concatenate.3" if version == "0.11.2" else "wrapped_concatenate.2"
                ]
            )
        )
        == []
    )


def test_what_is_no_program() -> None:
    with pytest.raises(
        ValueError, match="no ENTRY computation in this text: it is not an HLO module"
    ):
        hlo.parse("module @jit_step attributes {}")
