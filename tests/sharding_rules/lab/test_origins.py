"""Where the arrays of collectives come from, of programs a few lines long."""

from __future__ import annotations

import pytest

from sharding_rules.lab import hlo
from sharding_rules.lab.origins import used_in_part, with_origins
from sharding_rules.lab.report import Argument, Collective, Location

UP, DOWN = (
    Argument(f"params['{name}']", "params", (8, 16), "float32", 512, ()) for name in ("up", "down")
)
BIAS = Argument("bias", "other", (16, 1024, 1024), "float32", 16 * 2**22, ())


def module(entry: str, computations: str = "") -> hlo.Module:
    return hlo.parse(
        f"HloModule test\n{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"
    )


def sent(name: str, kind: str = "all-gather") -> Collective:
    return Collective(
        name, kind, ("tp",), 4, 1, ("f32[8,16]",), "f32", 512, 384.0, (), False, Location(), True, 0
    )


TWINS = """  %up = f32[2,16] parameter(0), metadata={op_name="params['up']"}
  %down = f32[2,16] parameter(1), metadata={op_name="params['down']"}
  %batch = f32[4,8] parameter(2), metadata={op_name="batch"}
  %cast = bf16[2,16] convert(%up)
  %all = (bf16[8,16], f32[8,16]) all-gather(%cast, %down), dimensions={0}, metadata={op_name="jit(f)/dot_general"}
  %one = bf16[8,16] get-tuple-element(%all), index=0
  %two = f32[8,16] get-tuple-element(%all), index=1
  %h = f32[4,16] dot(%batch, %one), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %whole = f32[4,64] all-gather(%h), dimensions={1}, metadata={op_name="jit(f)/all_gather"}
  ROOT %y = f32[4,16] dot(%whole, %two), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""


def test_weights_of_one_shape_are_told_apart() -> None:
    weights, hidden = with_origins(module(TWINS), [UP, DOWN], [sent("all"), sent("whole")])
    assert weights.made_of == ("params['up']", "params['down']") and not weights.by_hand
    assert hidden.made_of == ("",) and hidden.by_hand, (
        "it is computed, and somebody called lax.all_gather"
    )
    assert hidden.beside == ("params['up']", "params['down']"), (
        "of the matmul before it and of the one that takes it"
    )


@pytest.mark.parametrize(
    ("op_name", "by_hand"),
    [
        ("jit(f)/shard_map/psum", True),
        ("jit(f)/shard_map/psum_invariant", True),
        ("jit(f)/transpose(jvp(layers))/while/body/reduce_scatter", True),
        ("jit(f)/(a/psum:b/psum)", True),
        ("jit(f)/(a/psum:b/dot_general)", False),
        ("jit(f)/reduce_sum", False),
        ("jit(f)/shard_map/sharding_constraint", False),
    ],
)
def test_what_somebody_called(op_name: str, by_hand: bool) -> None:
    text = (
        "  %x = f32[8] parameter(0)\n  ROOT %sum = f32[8] all-reduce(%x), to_apply=%add, "
        f'metadata={{op_name="{op_name}"}}'
    )
    (one,) = with_origins(module(text), [], [sent("sum", "all-reduce")])
    assert one.by_hand is by_hand


def test_sums_that_xla_has_joined() -> None:
    """The combined instruction has no name; what takes its result apart has one. Ragged exchanges
    are never the partitioner's."""
    text = """  %x = f32[8] parameter(0)
  %sum = f32[8] all-reduce(%x), to_apply=%add
  %part = f32[4] slice(%sum), slice={[0:4]}
  %shaped = f32[2,2] bitcast(%part), metadata={op_name="jit(f)/shard_map/psum"}
  ROOT %ragged = f32[8] ragged-all-to-all(%x, %x, %x, %x, %x, %x)"""
    joined, ragged = with_origins(
        module(text), [], [sent("sum", "all-reduce"), sent("ragged", "ragged-all-to-all")]
    )
    assert joined.by_hand and ragged.by_hand


SLICED = """%fused (a: f32[16,1024,1024], b: u32[]) -> f32[4,1024,1024] {
  %a = f32[16,1024,1024] parameter(0)
  %b = u32[] parameter(1)
  ROOT %own = f32[4,1024,1024] dynamic-slice(%a, %b, %b, %b), dynamic_slice_sizes={4,1024,1024}
}"""


@pytest.mark.parametrize(
    ("use", "ways"),
    [
        ("%own = f32[4,1024,1024] fusion(%bias, %id), kind=kLoop, calls=%fused", 4),
        (
            (
                "%own = f32[2,1024,1024] dynamic-slice(%bias, %id, %id, %id), "
                "dynamic_slice_sizes={2,1024,1024}"
            ),
            8,
        ),
        ("%own = f32[16,1024,1024] negate(%bias)", 1),
        # the same slice on every device
        ("%own = f32[4,1024,1024] fusion(%bias, %row), kind=kLoop, calls=%fused", 1),
    ],
)
def test_a_table_of_which_a_device_uses_a_part(use: str, ways: int) -> None:
    entry = f"""  %bias = f32[16,1024,1024] parameter(0), metadata={{op_name="bias"}}
  %id = u32[] partition-id()
  %row = u32[] parameter(1)
  ROOT {use}"""
    (found,) = used_in_part(module(entry, SLICED), [BIAS])
    assert found.used_ways == ways
