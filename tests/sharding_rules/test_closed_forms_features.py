"""The closed forms of sums in int8 and by node, of islands, windows, experts and unequal stages,
against the formulas of their own modules and counts by hand. Nothing is compiled."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh_lm.config import load
from mesh_lm.model.ring_attention import Ring
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.context import ring_hops
from mesh_lm.planning.closed_forms.reductions import all_reduce, by_node, int8_half
from mesh_lm.planning.closed_forms.step import expected, expected_outer
from mesh_lm.planning.closed_forms.subjects import Decoder, NoFormError, Step, Strategy
from mesh_lm.planning.closed_forms.terms import AR, by_axes, total
from mesh_lm.planning.diloco import wire_bytes
from mesh_lm.planning.experts import token_bytes
from mesh_lm.training.check import check
from mesh_lm.training.expert_kernels import exchange_of
from tests.sharding_rules.test_closed_forms import GPT, LLAMA

H = 12288
MATRICES = [96 * 3 * H**2, 96 * H**2, 96 * 4 * H**2, 96 * 4 * H**2, 51200 * H, 2048 * H]
"""Elements of each matrix of GPT: q, k and v in one, out, up, down, and two tables."""
VECTORS = 96 * 13 * H + 2 * H


def test_int8_is_two_halves_of_every_matrix() -> None:
    terms = expected(GPT, Strategy("ddp", data=16, reduction="int8"), 1, 1)
    by_dtype = {"s8": 0.0, "f32": 0.0}
    for term in terms:
        by_dtype[term.dtype] += term.wire_bytes
    half = int8_half(MATRICES, 16)
    assert by_dtype["s8"] == pytest.approx(2 * half["s8"])
    assert by_dtype["f32"] == pytest.approx(2 * half["f32"] + all_reduce(VECTORS, 16))


@pytest.mark.parametrize(("reduction", "element_bytes"), [("auto", 4), ("bfloat16", 2)])
def test_two_levels_are_inside_and_across_nodes(reduction: str, element_bytes: int) -> None:
    strategy = Strategy("by_node", data=2, node=8, reduction=reduction)  # pyright: ignore
    sent = by_axes(expected(GPT, strategy, 1, 1))
    inside, across = by_node(MATRICES, 8, 2, element_bytes)
    assert sent["node",] == pytest.approx(inside)
    assert sent["data",] == pytest.approx(across)
    assert sent["data", "node"] == pytest.approx(all_reduce(VECTORS, 16))


def test_islands_send_their_weights_in_the_outer_step_alone() -> None:
    strategy = Strategy("diloco", data=4, island=8)
    assert {term.axes for term in expected(GPT, strategy, 1, 1)} == {("data",)}
    (term,) = expected_outer(GPT, strategy)
    weights = 4 * (sum(MATRICES) + VECTORS)
    assert (term.kind, term.axes, term.payload) == (AR, ("island",), weights)
    assert term.wire_bytes == pytest.approx(100 * wire_bytes(weights, 8, 100))


@given(some.integers(2, 16), some.one_of(some.none(), some.integers(1, 9000)))
def test_a_ring_goes_as_far_as_its_window(size: int, window: int | None) -> None:
    model = dataclasses.replace(GPT, seq=64 * 2 * size, windows=(window,))
    step = Step(model, Strategy("ring", sequence=size), 1, 1)
    hops, in_loops = ring_hops(step, window)
    assert hops == len(Ring("sequence", size, {"window": window}).steps(64)) - 1
    assert 0 <= in_loops <= max(0, hops - 2)


def test_windows_of_some_layers_shorten_the_ring_there() -> None:
    strategy = Strategy("ring", sequence=8)
    sent = {}
    for windows in ((None,), (129,), (129, None)):
        model = dataclasses.replace(LLAMA, windows=windows, remat="none")
        sent[windows] = total(expected(model, strategy, 1, 1), "sequence")
    near, every = sent[129,], sent[None,]
    gradients = total(expected(LLAMA, Strategy("context_gather", sequence=8), 1, 1)[-1:])
    assert near - gradients == pytest.approx((every - gradients) * 2 / 7)
    assert sent[129, None] == pytest.approx((near + every) / 2)


@pytest.mark.parametrize(("name", "devices"), [("mixtral_8x7b", 128), ("qwen3_30b_a3b", 64)])
def test_the_exchange_of_tokens_is_that_of_the_planner(name: str, devices: int) -> None:
    config = check(load(name), devices)
    terms = [term for term in expected_of(config) if term.axes == ("expert",)]
    exchange = exchange_of(config, config.model, "blocks")  # pyright: ignore[reportArgumentType]
    runs = config.model.n_layers * config.train.microbatches  # pyright: ignore
    assert total(terms) == pytest.approx(runs * token_bytes(exchange, config.model.d_model))  # pyright: ignore


def test_experts_are_summed_over_fewer_replicas() -> None:
    """Mixtral by hand: three matrices of each expert, and attention with the router."""
    config = check(load("mixtral_8x7b"), 128)
    sent = by_axes(expected_of(config))
    expert = 3 * 4096 * 14336
    dense = 2 * 4096 * (4096 + 1024)
    router = 4096 * 8
    # 33 x 4 runs and 4 bytes of the sums, 65 x 4 runs and 2 bytes of the gathers.
    assert sent["data",] == pytest.approx(15 / 16 * expert * (132 * 4 + 260 * 2))
    tables = 2 * 32_000 * 4096 * (4 + 2)
    both = 127 / 128 * (dense * (132 * 4 + 260 * 2) + router * (132 + 260) * 4 + tables)
    assert sent["data", "expert"] == pytest.approx(both, rel=1e-3)


def test_a_pass_is_as_long_as_the_longest_virtual_stage() -> None:
    strategy = Strategy("megatron", tensor=8, pipeline=2, stash="residuals")
    equal = expected(dataclasses.replace(GPT, layers=6), strategy, 1, 4)
    uneven = dataclasses.replace(strategy, layer_counts=(2, 4))
    found = expected(dataclasses.replace(GPT, layers=6), uneven, 1, 4)
    layers = [[t.times for t in terms if t.part == "layer"] for terms in (equal, found)]
    assert [n * 4 / 3 for n in layers[0]] == layers[1]


def test_experts_beside_tensor_parallelism_have_no_form() -> None:
    config = check(load("mixtral_8x7b"), 128)
    strategy = Strategy("ddp+experts_gather+megatron", expert=8, tensor=2)
    with pytest.raises(NoFormError, match="no closed form for experts under"):
        expected(Decoder.of(config.model), strategy, 1, 1)


def test_positions_of_a_part_of_the_sequence_are_gathered() -> None:
    """Each device has the rows of its own tokens, 4 s h / C bytes."""
    whole = expected(GPT, Strategy("megatron_sp", tensor=2), 2, 4)
    strategy = Strategy("megatron_sp+ulysses", tensor=2, sequence=4)
    part = expected(GPT, strategy, 2, 4)
    payloads = [[t.payload for t in terms if t.size == "p"] for terms in (whole, part)]
    assert payloads == [[4.0 * GPT.seq * GPT.d_model], [GPT.seq * GPT.d_model]]


def test_the_last_norm_of_a_single_microbatch_is_summed_once() -> None:
    strategy = Strategy("hsdp+megatron_sp", data=2, fsdp=2, tensor=2)
    once, twice = (by_axes(expected(GPT, strategy, 2, n), "payload_bytes") for n in (1, 2))
    last_norm = 4 * GPT.norm_vectors * GPT.d_model
    assert once["data", "fsdp", "tensor"] == last_norm
    assert ("data", "fsdp", "tensor") not in twice
    assert once["data",] == twice["data",] - last_norm
    assert once["fsdp", "tensor"] == (twice["fsdp", "tensor"] - last_norm) / 2
