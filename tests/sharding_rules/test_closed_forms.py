"""The closed forms against counts by hand, and relations between them. Nothing is compiled."""

import dataclasses
import itertools
from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import Decoder, Strategy
from mesh_lm.planning.closed_forms.terms import AG, AR, CP, RS, Term, by_axes, total
from mesh_lm.schedules.schedule import make_schedule
from mesh_lm.schedules.table import compile_table

GPT = Decoder(
    layers=96, d_model=12288, d_ff=4 * 12288, heads=96, kv_heads=96, head_dim=128, vocab=51200,
    seq=2048, learned_positions=True,
    biases=True, norm_vectors=2, gated=False, tied=True, remat="full", loss_chunk=1024,
)  # fmt: skip
LLAMA = dataclasses.replace(
    GPT, layers=32, d_model=4096, d_ff=14336, heads=32, kv_heads=8, vocab=128_256, seq=8192,
    learned_positions=False, biases=False,
    norm_vectors=1, gated=True, tied=False,
)  # fmt: skip
X, M = 2 * 2048 * 12288, 4  # bytes of one sequence's residual; microbatches
REMATS = ("none", "save_names", "full")

decoders = some.builds(
    dataclasses.replace,
    some.sampled_from([GPT, LLAMA]),
    layers=some.integers(1, 100),
    tied=some.booleans(),
    remat=some.sampled_from(REMATS),
)
counts = some.sampled_from([1, 2, 4, 8])
meshes = some.builds(
    Strategy,
    some.sampled_from(
        ["hsdp+megatron", "hsdp+megatron_sp", "zero1+hsdp+megatron_sp", "zero2+fsdp+megatron"]
    ),
    counts,
    counts,
    counts,
)


def model(remat: str) -> Decoder:
    return dataclasses.replace(GPT, remat=remat)


def runs(terms: list[Term], axis: str, size: str) -> Counter[str]:
    """kind -> times in the step, of the collectives of one size along one axis."""
    out: Counter[str] = Counter()
    for t in terms:
        if t.axes == (axis,) and t.size == size:
            out[t.kind] += t.times
    return out


@pytest.mark.parametrize(
    ("preset", "remat", "in_a_layer", "at_the_ends"),
    [
        # as counted earlier in a compiled program: 6 x 96 + 2, 5 x 96 + 2
        ("megatron_sp", "full", {AG: 6, RS: 5}, {AG: 2, RS: 2}),
        ("megatron_sp", "save_names", {AG: 6, RS: 4}, {AG: 2, RS: 2}),
        ("megatron_sp", "none", {AG: 4, RS: 4}, {AG: 2, RS: 2}),
        ("megatron", "full", {AR: 5}, {AR: 2}),
        # Shoeybi et al., figure 4: two forward, two backward
        ("megatron", "save_names", {AR: 4}, {AR: 2}),
        ("megatron", "none", {AR: 4}, {AR: 2}),
    ],
)
def test_tensor_parallel_moves_the_residual(
    preset: str, remat: str, in_a_layer: dict[str, int], at_the_ends: dict[str, int]
) -> None:
    terms = expected(model(remat), Strategy(preset, data=2, tensor=8), 1, M)
    assert {t.payload for t in terms if t.size == "X"} == {X}
    assert runs(terms, "tensor", "X") == {
        kind: M * (96 * n + at_the_ends[kind]) for kind, n in in_a_layer.items()
    }


def test_fsdp_gathers_twice_and_reduces_once() -> None:
    """12 h^2 parameters a layer, in bf16, for any recomputation."""
    for remat in REMATS:
        terms = expected(model(remat), Strategy("fsdp", fsdp=16), 1, M)
        assert runs(terms, "fsdp", "W") == {AG: M * 2 * 96, RS: M * 96}
        assert {t.payload for t in terms if t.size == "W"} == {12 * 12288**2 * 2}


def test_data_parallel_reduces_every_gradient_once_in_fp32() -> None:
    (term,) = expected(GPT, Strategy("ddp", data=64), 1, M)
    # Narayanan et al. 2021, eq. 2, and the last norm
    parameters = 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288 + (51200 + 2048) * 12288
    assert (term.kind, term.payload_bytes, term.wire_bytes) == (
        AR,
        4 * parameters,
        2 * 4 * parameters * 63 / 64,
    )
    (cut,) = [
        t
        for t in expected(GPT, Strategy("hsdp+megatron_sp", 8, 16, 8), 1, M)
        if t.axes == ("data",)
    ]
    assert (
        cut.payload == pytest.approx(4 * parameters / 128, rel=0.01)
        and cut.payload > 4 * parameters / 128
    )  # vectors that are replicated over tensor


def test_zero_in_units_of_the_parameters() -> None:
    """Rajbhandari et al., section 7: stages 1 and 2 can send what data parallel sends, 2 N; ours of
    stage 1 sends 3 N."""
    wire = {
        preset: total(expected(GPT, Strategy(preset, data=64), 1, M))
        for preset in ("ddp", "zero1", "zero2")
    }
    assert wire["zero2"] == wire["ddp"] and wire["zero1"] == pytest.approx(
        1.5 * wire["ddp"], rel=0.001
    )


def test_the_least_is_six_bytes_a_parameter() -> None:
    """4 of its gradient and 2 of its bf16 weight; 8 of an element of a vector, which every replica
    sums. 4 and 8 with sums in bf16."""
    matrices, vectors = 96 * 12 * 12288**2 + (51200 + 2048) * 12288, 96 * 13 * 12288 + 2 * 12288
    reductions: dict[Literal["auto", "bfloat16"], int] = {"auto": 6, "bfloat16": 4}
    for reduction, each in reductions.items():
        least = 63 / 64 * (each * matrices + 8 * vectors)
        for preset in ("distributed", "zero1", "zero2", "ddp"):
            terms = expected(GPT, Strategy(preset, data=64, reduction=reduction), 1, M)
            # whose vectors are in the one all-reduce
            apart = not (preset == "ddp" and reduction == "auto")
            assert total(terms, field="least_wire_bytes") == pytest.approx(
                least, rel=1e-9 if apart else 1e-4
            )
            assert (total(terms) == total(terms, field="least_wire_bytes")) == (
                preset == "distributed" or (preset, each) == ("ddp", 4)
            )


@pytest.mark.parametrize("data", [3, 48, 64])
def test_flat_vectors_of_gpt3(data: int) -> None:
    """By hand, for GPT-3 on pipeline 8 x tensor 8: parts of 128 elements divide 12 h^2 / 8,
    whatever divides h, and nothing is padded."""
    terms = expected(
        GPT, Strategy("distributed+megatron_sp", data=data, tensor=8, pipeline=8), 1, M
    )
    layer = 12 * 12288**2 // 8
    assert layer == 226_492_416
    moved = {
        (t.kind, t.dtype, t.axes): (t.times, t.payload)
        for t in terms
        if t.part in ("gradients", "weights")
    }
    assert moved[RS, "f32", ("data",)] == (12, 4 * layer) and moved[AG, "bf16", ("data",)] == (
        12,
        2 * layer,
    )
    assert moved[RS, "f32", ("pipeline", "data")] == (1, 4 * (51200 * 12288 // 8 + 2048 * 12288))


def test_padding_is_less_than_a_part_of_128_elements_for_each_replica() -> None:
    odd = dataclasses.replace(
        GPT, d_model=20, d_ff=80, heads=1, kv_heads=1, head_dim=20, layers=2, seq=7, vocab=11
    )
    terms = {
        (t.kind, t.per): t.payload for t in expected(odd, Strategy("distributed", data=3), 1, 1)
    }
    assert terms[RS, "row"] == 4 * 4992 and terms[AG, "row"] == 2 * 4992, (
        "4,800 elements in 13 x 128 each"
    )
    assert terms[RS, "step"] == 4 * 2 * 384, "220 and 140 elements, each in 128"


def test_zero_by_layers_cuts_the_stack_and_no_table() -> None:
    terms = {
        t.part + t.kind: t.payload
        for t in expected(GPT, Strategy("zero2", data=48, zero_by="layers"), 1, M)
    }
    assert terms["gradients" + RS] == terms["weights" + AG] == 4 * 96 * (12 * 12288**2 + 13 * 12288)
    assert terms["gradients" + AR] == 4 * ((51200 + 2048) * 12288 + 2 * 12288)


def test_tables_of_a_tied_and_an_untied_model() -> None:
    strategy, E = Strategy("hsdp+megatron_sp", 2, 4, 8), 2 * 128_256 * 4096 / 8
    gather, reduce = (AG, "bf16", E), (RS, "f32", 2 * E)
    # Of what is reduced half is needed; a tied table is gathered once, and could be reduced once.
    for tied, moved, least in (
        (False, [gather, reduce] * 2, 2 * (1 + 1)),
        (True, [gather, reduce, reduce], 1 + 1),
    ):
        terms = [
            t
            for t in expected(dataclasses.replace(LLAMA, tied=tied), strategy, 1, 1)
            if t.part in ("embedding", "head")
        ]
        fsdp = [t for t in terms if t.axes == ("fsdp",)]
        assert [(t.kind, t.dtype, t.payload) for t in fsdp] == moved
        assert total(fsdp, field="least_wire_bytes") == pytest.approx(least * E * 3 / 4)


def test_the_loss_sends_three_numbers_a_token() -> None:
    (loss,) = [
        t for t in expected(GPT, Strategy("megatron_sp", tensor=8), 3, M) if t.part == "loss"
    ]
    assert (loss.kind, loss.payload_bytes) == (AR, 3 * 4 * 3 * 2048 * M)
    (odd,) = [
        t
        for t in expected(
            dataclasses.replace(GPT, loss_chunk=5000), Strategy("megatron_sp", tensor=8), 3, 1
        )
        if t.part == "loss"
    ]
    assert odd.payload_bytes == 3 * 4 * 2 * 5000  # padded to whole chunks


@given(decoders, meshes, some.integers(1, 4), some.integers(1, 8))
def test_an_axis_of_one_device_sends_nothing(
    decoder: Decoder, mesh: Strategy, b: int, microbatches: int
) -> None:
    for axis in ("data", "fsdp", "tensor"):
        assert not total(
            expected(decoder, dataclasses.replace(mesh, **{axis: 1}), b, microbatches), axis
        )
    assert not expected(
        decoder, dataclasses.replace(mesh, data=1, fsdp=1, tensor=1), b, microbatches
    )


@given(decoders, meshes, some.integers(1, 4), some.integers(2, 8))
def test_what_microbatches_cost(
    decoder: Decoder, mesh: Strategy, b: int, microbatches: int
) -> None:
    """Twice as many of the same size: twice as much, but for what runs once a step. Of half the
    size: tensor's residual is the same. A single one sums the last norm otherwise."""
    one, two = (expected(decoder, mesh, b, n) for n in (microbatches, 2 * microbatches))
    assert [t.wire_bytes * (1 if t.per == "step" else 2) for t in one] == pytest.approx(
        [t.wire_bytes for t in two]
    )
    assert all(t.per == "step" for t in one if t.axes == ("data",))
    halves, whole = (
        expected(decoder, mesh, b, 2 * microbatches),
        expected(decoder, mesh, 2 * b, microbatches),
    )
    residual = [sum(t.wire_bytes for t in terms if t.size == "X") for terms in (halves, whole)]
    assert residual[0] == pytest.approx(residual[1])


@given(decoders, meshes, some.integers(1, 4), some.integers(1, 8))
def test_nothing_sends_less_than_it_must(
    decoder: Decoder, mesh: Strategy, b: int, microbatches: int
) -> None:
    terms = expected(decoder, mesh, b, microbatches)
    assert all(0 <= t.needed <= 1 and (t.needed == 1) == (not t.excess) and t.why for t in terms)
    assert sum(by_axes(terms).values()) == pytest.approx(total(terms))
    assert (
        total(terms, field="least_wire_bytes")
        <= total(terms)
        <= 2 * total(terms, field="payload_bytes")
    )


@given(decoders, some.integers(2, 8), some.integers(1, 4))
def test_sequence_parallel_is_free_without_recompute(decoder: Decoder, tensor: int, b: int) -> None:
    """Korthikanti et al., section 4.2.2: a gather and a reduce-scatter are an all-reduce. Recompute
    gathers again; plain TP need not."""
    residual = {
        (preset, remat): sum(
            t.wire_bytes
            for t in expected(
                dataclasses.replace(decoder, remat=remat), Strategy(preset, tensor=tensor), b, 1
            )
            if t.size == "X"
        )
        for preset, remat in itertools.product(("megatron", "megatron_sp"), REMATS)
    }
    assert residual["megatron_sp", "none"] == pytest.approx(residual["megatron", "none"])
    assert (
        residual["megatron_sp", "save_names"]
        > residual["megatron", "save_names"]
        == residual["megatron", "none"]
    )
    assert (
        residual["megatron_sp", "full"]
        > residual["megatron", "full"]
        > residual["megatron", "none"]
    )


def test_a_product_is_its_factors() -> None:
    """fsdp+megatron and hsdp+megatron are one strategy; tensor halves what fsdp sends, and nothing
    of what tensor itself sends."""
    assert expected(GPT, Strategy("fsdp+megatron_sp", 2, 4, 2), 1, M) == expected(
        GPT, Strategy("hsdp+megatron_sp", 2, 4, 2), 1, M
    )
    both, alone = (expected(GPT, Strategy("hsdp+megatron_sp", 2, 4, t), 1, M) for t in (2, 1))
    assert runs(both, "fsdp", "W") == runs(alone, "fsdp", "W")
    assert [sum(t.payload_bytes for t in terms if t.size == "W") for terms in (both, alone)] == [
        M * 3 * 96 * 12 * 12288**2 * n for n in (1, 2)
    ]


@pytest.mark.parametrize(
    ("preset", "axis"), [("ddp", "fsdp"), ("fsdp", "data"), ("hsdp", "tensor"), ("zero1", "tensor")]
)
def test_an_axis_that_nothing_is_cut_over_is_refused(preset: str, axis: str) -> None:
    with pytest.raises(ValueError, match=f"{preset} shards nothing over {axis}"):
        dataclasses.replace(Strategy(preset), **{axis: 2})


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="no closed form for preset zero9"):
        Strategy("hsdp+zero9")


@given(some.integers(2, 6), some.integers(1, 5), some.integers(1, 4), some.booleans())
def test_ticks_are_those_of_the_schedule(
    stages: int, chunks: int, rounds: int, drop_last_forward: bool
) -> None:
    microbatches = rounds * stages if chunks > 1 else rounds
    made = compile_table(make_schedule("1f1b", stages, microbatches, chunks), drop_last_forward)
    strategy = Strategy(
        "ddp", pipeline=stages, virtual=chunks, stash="input" if drop_last_forward else "residuals"
    )
    found = tuple(
        sum(ticks.stop - ticks.start for slots, ticks in made.loops() if slot in slots)
        for slot in "FB"
    )
    assert strategy.ticks(microbatches) == found
    busy = (made.columns["backward_microbatch"] >= 0).sum(0)
    assert set(busy) == {microbatches * chunks}, (
        "of the ticks, those in which what a stage sends back is of use"
    )


def test_a_stage_sends_its_own_layers_only() -> None:
    """By hand: a hop is the residual stream in bf16, each way; data sums a P-th of the layers, all
    stages sum the tables."""
    P, V, D = 8, 3, 16
    terms = expected(
        model("save_names"),
        Strategy("ddp", data=D, pipeline=P, virtual=V, stash="residuals"),
        1,
        48,
    )
    sent = by_axes(terms)
    assert sent["pipeline",] == 2 * (48 * V + P - 1) * X
    tables, last = 51200 * 12288 + 2048 * 12288, 2 * 12288
    layers = 12 * (12 * 12288**2 + 13 * 12288)
    assert sent["data",] == pytest.approx(2 * (D - 1) / D * 4 * layers)
    assert sent["pipeline", "data"] == pytest.approx(
        2 * (P * D - 1) / (P * D) * 4 * (tables + last)
    )
    hops = [t for t in terms if t.kind == CP]
    assert sum(t.least_wire_bytes for t in hops) == pytest.approx(2 * 48 * V * X)


@pytest.mark.parametrize("remat", REMATS)
def test_a_stash_of_inputs_runs_the_forward_pass_twice(remat: str) -> None:
    one = Strategy("megatron_sp", tensor=8, pipeline=8)
    again, kept = (
        runs(expected(model(remat), dataclasses.replace(one, stash=stash), 1, 16), "tensor", "X")
        for stash in ("input", "residuals")
    )
    ticks = 16 + 7 - 1  # a backward slot in 23, but a forward slot in 22 instead of 23
    assert again - kept == {AG: 2 * 12 * ticks, RS: 2 * 12 * ticks + 16}, (
        "of 12 layers; and of the embedding"
    )


def test_stages_of_unequal_layers_have_no_form() -> None:
    with pytest.raises(ValueError, match="no closed form for 96 layers on 5 x 2 virtual stages"):
        expected(GPT, Strategy("ddp", pipeline=5, virtual=2), 1, 10)
