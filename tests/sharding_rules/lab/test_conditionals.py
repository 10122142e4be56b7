"""Conditionals that are counted with a probability: rounds of an exchange, on paper and compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharding_rules.lab import compile as lab
from sharding_rules.lab import compile_report, h100, hlo
from sharding_rules.lab.ledger import (
    collectives,
    conditionals,
    copies,
    flops_by_phase,
    flops_by_stage,
)
from sharding_rules.lab.prices import collective_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import Conditional, LabError, Report, Slot
from sharding_rules.lab.summary import conditionals_words, rows
from sharding_rules.lab.targets import TARGETS
from sharding_rules.lab.timeline import priced, replay
from sharding_rules.scopes import EXTRA_ROUND
from tests.sharding_rules.lab.test_groups import mesh_of

COMPILE_BUDGET = 3

H100 = TARGETS["h100"]
MESH = mesh_of(node=8, expert=8)
LAYERS, ROUNDS = 6, 4
N = 8192
DOT_FLOPS = 2 * N**3
X = f"bf16[{N},{N}]{{1,0}}"
LOOPS = "jit(step)/jvp(layers)/while/body/closed_call/experts/shard_map/while/body/closed_call"


def program(scope: str) -> str:
    """A loop of layers, in each a matmul and a loop of rounds, whose conditional is in `scope`."""
    path = f"{LOOPS}/checkpoint/{scope}/cond"
    gather = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    dot = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"""HloModule step, is_scheduled=true

%run (p.1: bf16[{N},{N}]) -> bf16[{N},{N}] {{
  %p.1 = {X} parameter(0)
  %gathered = bf16[{8 * N},{N}]{{1,0}} all-gather(%p.1), {gather}, metadata={{op_name="{path}/branch_1_fun/all_gather"}}
  ROOT %extra = {X} dot(%p.1, %p.1), {dot}, metadata={{op_name="{path}/branch_1_fun/dot_general"}}
}}

%skip (p.2: bf16[{N},{N}]) -> bf16[{N},{N}] {{
  %p.2 = {X} parameter(0)
  ROOT %zeros = {X} copy(%p.2), metadata={{op_name="{path}/branch_0_fun/broadcast_in_dim"}}
}}

%continues (p.5: bf16[{N},{N}]) -> bf16[{N},{N}] {{
  ROOT %p.5 = {X} parameter(0)
}}

%round (p.3: (pred[], bf16[{N},{N}])) -> (pred[], bf16[{N},{N}]) {{
  %p.3 = (pred[], {X}) parameter(0)
  %needed = pred[] get-tuple-element(%p.3), index=0
  %x.3 = {X} get-tuple-element(%p.3), index=1
  %y.3 = {X} conditional(%needed, %x.3, %x.3), true_computation=%run, false_computation=%skip, metadata={{op_name="{path}"}}
  ROOT %out.3 = (pred[], {X}) tuple(%needed, %y.3)
}}

%layer (p.4: (pred[], bf16[{N},{N}])) -> (pred[], bf16[{N},{N}]) {{
  %p.4 = (pred[], {X}) parameter(0)
  %needed.4 = pred[] get-tuple-element(%p.4), index=0
  %x.4 = {X} get-tuple-element(%p.4), index=1
  %first = {X} dot(%x.4, %x.4), {dot}, metadata={{op_name="{LOOPS}/dot_general"}}
  %start.4 = (pred[], {X}) tuple(%needed.4, %first)
  ROOT %rounds = (pred[], {X}) while(%start.4), condition=%continues, body=%round, backend_config={{"known_trip_count":{{"n":"{ROUNDS}"}}}}
}}

ENTRY %main (x.0: (pred[], bf16[{N},{N}])) -> (pred[], bf16[{N},{N}]) {{
  %x.0 = (pred[], {X}) parameter(0)
  ROOT %layers = (pred[], {X}) while(%x.0), condition=%continues, body=%layer, backend_config={{"known_trip_count":{{"n":"{LAYERS}"}}}}
}}
"""


def counted(probability: float, scope: str = EXTRA_ROUND) -> hlo.Module:
    return hlo.parse(program(scope), probabilities={EXTRA_ROUND: probability})


@pytest.mark.parametrize("probability", [0, 0.25, 0.3, 1])
def test_branches_count_as_often_as_they_are_likely(probability: float) -> None:
    module = counted(probability)
    expected_rounds = ROUNDS * probability
    sent = collectives(module, Provenance(module), MESH)
    assert [(one.times, one.bounded, one.conditional) for one in sent] == [
        (pytest.approx(LAYERS * expected_rounds), False, True)
    ] * (probability > 0)
    expected_flops = round(LAYERS * (1 + expected_rounds) * DOT_FLOPS)
    assert flops_by_phase(module, Provenance(module)) == {
        "forward": pytest.approx(expected_flops, rel=1e-12)
    }
    assert flops_by_stage(module) == (pytest.approx(expected_flops, rel=1e-12),)
    assert module.total_flops("main") == pytest.approx(expected_flops, rel=1e-12)
    assert conditionals(module) == (Conditional(EXTRA_ROUND, probability, LAYERS * ROUNDS),)


@pytest.mark.parametrize("probability", [0, 0.25, 0.3, 1])
def test_the_timeline_expects_the_mean_of_the_branches(probability: float) -> None:
    module = counted(probability)
    provenance = Provenance(module)
    sent = collectives(module, provenance, MESH)
    line = replay(module, provenance, sent, H100)

    def step(branch: str) -> float:
        always = counted(1.0 if branch == "run" else 0.0)
        everything = collectives(always, Provenance(always), MESH)
        return replay(always, Provenance(always), everything, H100).step

    mean = probability * step("run") + (1 - probability) * step("skip")
    assert line.step == pytest.approx(mean) and step("run") > 2 * step("skip")
    waits = sum(line.waits.values())
    assert line.network == pytest.approx(line.exposed) == pytest.approx(waits)
    for one in priced(sent, line, H100):
        assert one.exposed == pytest.approx(one.times * collective_us(one, H100))
    assert ("gathered" in {span.name for span in line.spans}) == (probability == 1), (
        "only what is certain is drawn"
    )
    drawn = {span.name: span.loops for span in line.spans}
    assert drawn.get("zeros", (LAYERS, ROUNDS)) == (LAYERS, ROUNDS)


def test_another_conditional_counts_as_if_it_always_ran() -> None:
    module = counted(0, scope="other")
    (gather,) = collectives(module, Provenance(module), MESH)
    assert gather.bounded and gather.times == LAYERS * ROUNDS
    assert flops_by_stage(module) == (LAYERS * (1 + ROUNDS) * DOT_FLOPS,)
    assert conditionals(module) == ()
    # The scope is outside of the loop, not directly around the conditional.
    loop = program("x").replace("experts/", f"{EXTRA_ROUND}/")
    outside = hlo.parse(loop, probabilities={EXTRA_ROUND: 0})
    assert conditionals(outside) == ()


@pytest.mark.parametrize(
    "scope",
    [
        f"rematted_computation/{EXTRA_ROUND}",
        f"transpose(jvp({EXTRA_ROUND}))",
        f"{EXTRA_ROUND}/checkpoint",
        f"jvp(experts)/{EXTRA_ROUND}",
    ],
)
def test_the_mark_is_read_through_transformations(scope: str) -> None:
    module = counted(0, scope)
    assert [one.times for one in conditionals(module)] == [LAYERS * ROUNDS]
    assert collectives(module, Provenance(module), MESH) == ()


def test_a_slot_of_the_same_conditional_knows_more() -> None:
    slot = Slot(EXTRA_ROUND, ("1100",))
    module = hlo.parse(program(EXTRA_ROUND), (slot,), {EXTRA_ROUND: 0})
    (gather,) = collectives(module, Provenance(module), MESH)
    assert gather.times == 2 * LAYERS and conditionals(module) == ()


def test_copies_of_a_branch_that_does_not_run_are_left_out() -> None:
    for probability, n in ((0, LAYERS * ROUNDS), (0.5, LAYERS * ROUNDS / 2)):
        module = counted(probability)
        assert [(one.name, one.times) for one in copies(module, Provenance(module))] == [
            ("zeros", n)
        ]
    module = counted(1)
    assert copies(module, Provenance(module)) == ()


def test_a_wrong_probability_is_an_error_and_a_useless_one_a_warning() -> None:
    with pytest.raises(
        LabError, match=r"the probability of 'x' is 1.5; it must be between 0 and 1"
    ):
        lab._checked_probabilities({"x": 1.5})
    assert lab._checked_probabilities({"x": 1}) == {EXTRA_ROUND: 0, "x": 1}
    module = hlo.parse(program("other"), probabilities=lab._checked_probabilities({"x": 1}))
    assert list(lab._useless_probabilities(module)) == [
        "probability 'x' fits no conditional, and counts nothing"
    ]


# Compiled.

TOKENS, WIDTH = 256, 512


def _exchanged(x: jax.Array, w: jax.Array) -> jax.Array:
    y = lax.all_gather(x, "expert", tiled=True) @ w
    return lax.psum_scatter(jax.nn.gelu(y), "expert", tiled=True)


def _experts(x: jax.Array, w: jax.Array) -> jax.Array:
    """A round of an exchange, and further ones that run where the data asks for them."""
    n_needed = lax.pmax((x[0, 0] > 0).astype(jnp.int32) * ROUNDS, "expert")

    def further_round(y: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        def conditional(x: jax.Array, w: jax.Array) -> jax.Array:
            with jax.named_scope(EXTRA_ROUND):
                return lax.cond(number < n_needed, _exchanged, lambda x, w: jnp.zeros_like(x), x, w)

        return y + jax.checkpoint(conditional)(x, w), None

    return lax.scan(further_round, _exchanged(x, w), jnp.arange(1, 1 + ROUNDS))[0]


def compiled(probabilities: dict[str, float] | None) -> Report:
    mesh = h100(expert=8)
    spec = P("expert")
    experts = jax.shard_map(_experts, mesh=mesh, in_specs=(spec, P()), out_specs=spec)

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("experts"):
                return x + experts(x, w), None

        with jax.named_scope("layers"):
            x, _ = lax.scan(jax.checkpoint(layer), x, params)
        return jnp.square(x.astype(jnp.float32)).mean()

    def array(shape: tuple[int, ...], *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, P(*axes)))

    params = array((LAYERS, WIDTH, WIDTH))
    x = array((8 * TOKENS, WIDTH), "expert")
    return compile_report(jax.grad(loss), params, x, mesh=mesh, probabilities=probabilities)


@pytest.mark.deviceless
def test_the_compiled_program_keeps_the_mark() -> None:
    """In the forward pass, the recompute and the backward pass, inside loops and checkpoints."""
    balanced = compiled(None)
    n_conditionals = 3 * LAYERS * ROUNDS
    assert balanced.conditionals == (Conditional(EXTRA_ROUND, 0, n_conditionals),)
    assert conditionals_words(balanced) == f"{n_conditionals} of extra_round with probability 0"
    assert Report.from_json(balanced.to_json()) == balanced
    assert not any(one.bounded for one in balanced.collectives)

    flops = 2 * 8 * TOKENS * WIDTH * WIDTH
    per_phase = {"forward": 1, "recompute": 1, "backward": 2}
    assert balanced.flops == {phase: LAYERS * n * flops for phase, n in per_phase.items()}
    half = compiled({EXTRA_ROUND: 0.5})
    rounds = LAYERS * (1 + ROUNDS / 2)
    assert half.flops == {phase: rounds * n * flops for phase, n in per_phase.items()}
    always = compiled({EXTRA_ROUND: 1})
    rounds = LAYERS * (1 + ROUNDS)
    assert always.flops == {phase: rounds * n * flops for phase, n in per_phase.items()}

    sent = [report.wire_bytes("expert") for report in (balanced, half, always)]
    assert sent[1] == (sent[0] + sent[2]) / 2 and sent[2] > 4 * sent[0]
    assert balanced.timeline and half.timeline and always.timeline
    assert balanced.timeline.step < half.timeline.step < always.timeline.step
    assert balanced.peak_bytes == half.peak_bytes == always.peak_bytes, "memory counts in full"
    assert all(row.count for row in rows(half, lambda one: (one.kind,)))
