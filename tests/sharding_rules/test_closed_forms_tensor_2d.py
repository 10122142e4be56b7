"""The closed forms of tensor parallelism in two and more dimensions, against counts by hand, and
relations between them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh_lm.planning.closed_forms import tensor_2d
from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import Decoder, Strategy
from mesh_lm.planning.closed_forms.terms import Term, total
from tests.sharding_rules.test_closed_forms import GPT, LLAMA

SIZES = some.sampled_from([1, 2, 4, 8, 16])
RATIOS = some.floats(0.01, 100)


def of_layers(model: Decoder, strategy: Strategy) -> list[Term]:
    """What layers send of activations, without the sums of norms and the gradients of vectors."""
    return [t for t in expected(model, strategy, 1, 1) if t.part == "layer" and t.dtype == "bf16"]


@given(
    some.sampled_from(["none", "save_names"]),
    some.sampled_from([1, 2, 4, 8]),
    some.sampled_from([1, 2, 4]),
)
def test_a_layer_of_gpt(remat: str, x: int, y: int) -> None:
    """In elements T h / t: 25 (y - 1) over tensor_y, 8 (x - 1) over tensor."""
    model = dataclasses.replace(GPT, remat=remat)
    found = of_layers(model, Strategy("megatron_2d", tensor=x, tensor_y=y))
    unit = 2 * 2048 * 12288 / (x * y) * model.layers
    assert total(found, "tensor_y") == pytest.approx(25 * (y - 1) * unit)
    assert total(found, "tensor") == pytest.approx(8 * (x - 1) * unit)


def test_a_layer_with_grouped_queries_and_a_gate() -> None:
    """2 (n + 2 k) H + 3 n H of attention, 2 x 3 F of the MLP, over y; the residual stream is that
    of any layer."""
    model = dataclasses.replace(LLAMA, remat="none")
    found = of_layers(model, Strategy("megatron_2d", tensor=4, tensor_y=2))
    tokens, width = 8192, 2 * (32 + 16) * 128 + 3 * 32 * 128 + 6 * 14336
    assert total(found, "tensor_y") == pytest.approx(model.layers * 2 * tokens * width / 8)
    assert total(found, "tensor") == pytest.approx(model.layers * 2 * tokens * 4096 * 8 * 3 / 8)


@given(SIZES)
def test_one_row_is_megatron(x: int) -> None:
    plain, square = (
        of_layers(GPT, Strategy(preset, tensor=x)) for preset in ("megatron", "megatron_2d")
    )
    assert total(plain) == pytest.approx(total(square))


def test_where_two_dimensions_send_less() -> None:
    """Half the columns for two rows saves 4 x of 8 (x - 1), and costs 25: from eight devices on."""
    better = {t for t in (2, 4, 8, 16, 32, 64) if tensor_2d.two(1, t // 2, 2) < tensor_2d.one(1, t)}
    assert better == {8, 16, 32, 64}
    assert [
        tensor_2d.two(1, t // 2, 2) / tensor_2d.one(1, t) for t in (8, 16, 32)
    ] == pytest.approx([49 / 56, 81 / 120, 145 / 248])


@given(RATIOS, SIZES, SIZES)
def test_the_rules_send_less_than_two_and_a_half_dimensions(r: float, q: int, d: int) -> None:
    """`hsdp+megatron_sp` on data=d, fsdp=q, tensor=q shards the same, and pairs the matmuls: 13 (q
    - 1) r less."""
    less = tensor_2d.two_and_a_half(r, q, d) - tensor_2d.with_fsdp(r, d, q, q, 1)
    assert less == pytest.approx(13 * (q - 1) * r, abs=1e-6)


@given(RATIOS, SIZES)
def test_the_rules_send_less_than_three_dimensions(r: float, p: int) -> None:
    """`fsdp+megatron_2d` on fsdp=p, tensor=p, tensor_y=p: 6 (p - 1) r less."""
    assert tensor_2d.three(r, p) - tensor_2d.with_fsdp(r, 1, p, p, p) == pytest.approx(
        6 * (p - 1) * r, abs=1e-6
    )


@pytest.mark.parametrize(
    ("preset", "d", "y"), [("fsdp+megatron_2d", 1, 2), ("hsdp+megatron", 2, 1)]
)
def test_with_fsdp_is_the_sum_of_its_terms(preset: str, d: int, y: int) -> None:
    """One sequence for each shard of the batch; the gradients over data are 12 h^2 elements of the
    layer's matrices."""
    model, h, z, x = dataclasses.replace(GPT, remat="none"), 12288, 4, 8
    t = d * z * x * y
    found = of_layers(model, Strategy(preset, data=d, fsdp=z, tensor=x, tensor_y=y))
    elements = total(found) / 2 / model.layers + 2 * (d - 1) / d * 12 * h**2 / (z * x * y)
    assert elements == pytest.approx(tensor_2d.with_fsdp(d * z * 2048 / h, d, z, x, y) * h**2 / t)
