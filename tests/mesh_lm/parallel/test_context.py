"""Context parallelism: attention over sharded sequences equals that of one device, in every form
and with every other axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import experts_toy
import jax
import numpy as np
import pytest
from support import (
    BATCH,
    GPT,
    LLAMA,
    SEQ,
    assert_same_gradients,
    by_stage,
    gradients,
    host_batch,
    initial,
    on_devices,
    reference,
    shard_on,
)

from mesh_lm.config import PipelineConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.model.context import repeats
from mesh_lm.model.ring_attention import Ring
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import Decoder, Strategy
from mesh_lm.planning.closed_forms.terms import A2A
from sharding_rules import Shard, ShardingRuleError, preset, token_order

COMPILE_BUDGET = 68
FULL = dataclasses.replace(LLAMA, window=(), n_kv_heads=4, remat="save_names")
"""Without windows, so that a ring has a loop; with remat of the names that Ulysses gives."""
NARROW = dataclasses.replace(GPT, positions="rotary", window=(3,), dropout=0.0, sinks=True)
"""A window in every layer, wider than a chunk of 8 shards and narrower than one of 2."""


@dataclasses.dataclass(frozen=True)
class Case:
    config: DecoderConfig
    rules: str
    mesh: dict[str, Any]
    microbatches: int = 1
    separate: bool = False
    pipeline: PipelineConfig = PipelineConfig()

    def __str__(self) -> str:
        return f"{self.rules}-{'-'.join(f'{axis}{size}' for axis, size in self.mesh.items() if axis != 'extra')}"


USP = {"sequence": 2, "extra": ("ulysses=4",)}
CASES = [
    Case(GPT, "context_gather", {"sequence": 4}),
    Case(GPT, "ulysses", {"sequence": 4}, 2, separate=True),
    Case(GPT, "ring", {"sequence": 4}, separate=True),
    Case(FULL, "ring", {"sequence": 8}, separate=True),
    Case(FULL, "ring+megatron_sp", {"data": 2, "sequence": 2, "tensor": 2}, 2),
    Case(LLAMA, "ring", {"sequence": 8}),
    Case(LLAMA, "context_gather+fsdp", {"fsdp": 2, "sequence": 4}, separate=True),
    Case(LLAMA, "ulysses+megatron", {"sequence": 4, "tensor": 2}, separate=True),
    Case(FULL, "usp", USP, separate=True),
    Case(NARROW, "ring", {"sequence": 8}),
    Case(NARROW, "context_gather+megatron_sp", {"sequence": 2, "tensor": 4}),
    Case(GPT, "ring+distributed", {"pipeline": 2, "data": 2, "sequence": 2}, 4),
    Case(FULL, "ulysses+zero3+megatron_sp", {"data": 2, "sequence": 2, "tensor": 2}),
    Case(
        FULL,
        "context_gather+zero3",
        {"pipeline": 2, "sequence": 4},
        4,
        pipeline=PipelineConfig(stash="residuals"),
    ),
    Case(dataclasses.replace(FULL, n_layers=3), "ulysses", {"pipeline": 2, "sequence": 4}, 2),
    Case(
        dataclasses.replace(FULL, n_layers=3), "ring", {"pipeline": 2, "sequence": 2, "data": 2}, 2
    ),
    Case(FULL, "usp+megatron_sp", {"sequence": 2, "tensor": 2, "extra": ("ulysses=2",)}),
    Case(
        LLAMA,
        "megatron_sp+usp",
        {"sequence": 2, "tensor": 2, "extra": ("ulysses=2",)},
        2,
        separate=True,
    ),
]


FAST = [CASES[2], CASES[8]]
"""A ring, and a ring around Ulysses' exchange; the other forms, axes, windows and stages are
CI's."""
COMPLETE_RUN = [CASES[5], CASES[15]]
"""CI has other rings of 8, and a ring in stages with distributed moments."""


def mark(case: Case) -> Any:
    return (
        () if case in FAST else pytest.mark.exhaustive if case in COMPLETE_RUN else pytest.mark.slow
    )


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark(case)) for case in CASES], ids=str)
def test_equals_one_device(case: Case) -> None:
    pipeline = (
        dataclasses.replace(case.pipeline, layers=(1, 2))
        if case.config.n_layers == 3
        else case.pipeline
    )
    params, wanted_sums, wanted = reference(case.config, case.separate)
    shard = shard_on(case.rules, **case.mesh)
    _, sums, grads = gradients(
        case.config, shard, case.microbatches, case.separate, pipeline, params
    )
    assert_same_gradients(grads, wanted)
    assert sums == pytest.approx(wanted_sums, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange", [pytest.param("ring", marks=pytest.mark.exhaustive), "ulysses"]
)
def test_experts_equal_one_device(exchange: str) -> None:
    """A mixture of experts that is sharded over a mesh axis of its own, and a loss that layers add
    to."""
    over_experts = {kind: {"experts": "routed"} for kind in ("params", "activations")}
    rules = experts_toy.rules(exchange).replace(exchange, axes={"routed": "auto"}, **over_experts)
    shard = shard_on(rules, data=2, sequence=2, extra=("routed=2",))
    _, sums, grads = gradients(experts_toy.MODEL, shard, 2, separate=True)
    _, wanted_sums, wanted = gradients(
        experts_toy.MODEL, shard_on(experts_toy.rules("ddp")), separate=True
    )
    assert_same_gradients(grads, wanted)
    for name, value in wanted_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [("ring", {"sequence": 4}), ("context_gather+fsdp", {"fsdp": 2, "sequence": 2})],
)
def test_shards_without_labels(rules: str, mesh: dict[str, int]) -> None:
    """Loss and gradients are means over all labels, not of the means of shards, some of which have
    none (Megatron-LM issues 673, 906)."""
    batch = host_batch(1)
    batch["weights"] *= np.arange(SEQ) >= SEQ - 3

    def run(shard: Shard) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        layout = ModelLayout.of(FULL, shard)
        params = by_stage(layout, initial(layout))
        sums, grads = jax.jit(engine.value_and_grad(layout))(
            params, on_devices(batch, layout), jax.random.key(3)
        )
        evaluated = jax.jit(engine.evaluate(layout))(params, on_devices(batch, layout))
        assert float(evaluated["loss"]) == pytest.approx(float(sums["loss"]), rel=1e-5)
        return jax.tree.map(float, sums), jax.tree.map(np.asarray, grads)

    (sums, grads), (wanted_sums, wanted) = run(shard_on(rules, **mesh)), run(shard_on("ddp"))
    assert sums == pytest.approx(wanted_sums, rel=1e-5) and sums["weight"] == batch["weights"].sum()
    assert_same_gradients(grads, wanted)


def test_an_axis_without_an_exchange_is_refused() -> None:
    rules = preset("ddp").replace(activations={"seq": "sequence", "seq_resid": "sequence"})
    layout = ModelLayout.of(GPT, shard_on(rules, sequence=4))
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in host_batch(1).items()}
    with pytest.raises(
        ShardingRuleError,
        match=(
            r"sharded over 'sequence', and attention needs all keys; set "
            r"rules.context\['sequence'\] to"
        ),
    ):
        jax.eval_shape(engine.value_and_grad(layout), layout.shapes, batch, jax.random.key(0))


@pytest.mark.parametrize(
    ("ways", "order"), [(1, None), (2, [0, 3, 1, 2]), (4, [0, 7, 1, 6, 2, 5, 3, 4])]
)
def test_zig_zag(ways: int, order: list[int] | None) -> None:
    """Chunks i and 2 n - 1 - i are neighbours. Ulysses needs no order."""
    found = token_order(preset("ring"), {"sequence": ways}, 16)
    assert (found is None and order is None) or (
        order and found[:: 16 // len(order)].tolist() == [c * 16 // len(order) for c in order]
    )
    assert token_order(preset("ulysses"), {"sequence": ways}, 16) is None
    both = token_order(preset("usp"), {"sequence": ways, "ulysses": 4}, 16)
    assert (both is None and found is None) or np.array_equal(both, found)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("window", [None, 1, 2, 9, 10, 16, 40, 1000])
def test_a_ring_visits_the_shards_that_a_query_sees(n: int, window: int | None) -> None:
    """Those, no others, and by the shortest hops."""
    C, ring = 8, Ring("sequence", n, {"window": window})
    tokens = token_order(preset("ring"), {"sequence": n}, 2 * n * C).reshape(n, -1)
    # [shard of queries, shard of keys, query, key]
    ahead = tokens[:, None, :, None] - tokens[None, :, None, :]
    seen = ((ahead >= 0) & (ahead < (window or 10**6))).any((2, 3))
    wanted = {(i - j) % n for i in range(n) for j in range(n) if seen[i, j]}
    assert ring.steps(C) == sorted(wanted)
    walked = (
        ring.walk(C, lambda carry, t, came, goes: [*carry, (int(t), came, goes)], [])
        if len(wanted) < 4
        else None
    )
    if walked:
        places = [ring.first_hop(C)]
        for _, _, goes in walked[:-1]:
            places.append(places[-1] + goes)
        assert places == ring.steps(C)[1:] and walked[0][1] == walked[-1][2] == 0


@pytest.mark.parametrize(
    ("rules", "mesh", "kv_heads", "repeated"),
    [
        ("ulysses+megatron_sp", {"sequence": 4, "tensor": 2}, 4, False),
        ("ulysses+megatron", {"sequence": 4, "tensor": 2}, 4, True),
        ("usp+megatron_sp", {"sequence": 2, "tensor": 2, "extra": ("ulysses=2",)}, 2, False),
        ("usp+megatron_sp", {"sequence": 2, "tensor": 1, "extra": ("ulysses=4",)}, 2, True),
    ],
)
def test_the_program_repeats_kv_heads_where_the_closed_form_does(
    rules: str, mesh: dict[str, Any], kv_heads: int, repeated: bool
) -> None:
    """Of two sequences in a device's microbatch: where layers have the sequence first, the kv heads
    of both are divided together."""
    config = dataclasses.replace(FULL, n_kv_heads=kv_heads, dtype="bfloat16")
    shard = shard_on(rules, **mesh)
    layout = ModelLayout.of(config, shard)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in host_batch(8).items()}
    traced = jax.make_jaxpr(engine.value_and_grad(layout))(layout.shapes, batch, jax.random.key(0))
    sent = {
        var.aval.size * var.aval.dtype.itemsize for var in _operands(traced.jaxpr, "all_to_all")
    }

    sizes = shard.mesh.shape
    strategy = Strategy(
        rules, tensor=sizes["tensor"], sequence=sizes["sequence"], ulysses=sizes.get("ulysses", 1)
    )
    terms = expected(Decoder.of(config), strategy, BATCH // 8, 8)
    assert sent == {term.payload for term in terms if term.kind == A2A}
    without = (
        2
        * (BATCH // 8)
        * SEQ
        // (strategy.sequence * strategy.ulysses)
        * config.d_head
        * (config.n_heads + 2 * config.kv_heads)
    )
    assert (max(sent) > without // sizes["tensor"]) == repeated


def _operands(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """The first operands of every equation of a primitive, also in the equations' own jaxprs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            yield eqn.invars[0]
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _operands(inner, primitive)


@pytest.mark.parametrize(
    ("kv_heads", "ways", "times"), [(8, 8, 1), (8, 4, 1), (2, 8, 4), (6, 4, 2), (1, 8, 8)]
)
def test_kv_heads_are_repeated_until_they_divide(kv_heads: int, ways: int, times: int) -> None:
    assert repeats(kv_heads, ways) == times
