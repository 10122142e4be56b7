"""Findings about a mixture of experts in plain JAX, compiled: each mistake, and the step without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules import EXPERTS, Rules, preset
from sharding_rules.lab import Finding, compile_report, h100, lint
from sharding_rules.lab.report import Argument, Report
from tests.sharding_rules.lab.test_lint import only

COMPILE_BUDGET = 11
pytestmark = pytest.mark.deviceless

L, E, T, D, F, G = 4, 16, 512, 1024, 1024, 8
"""Layers, experts of a layer, tokens of a device, widths, devices."""
AXES = {
    "up": ("layers", "experts", "embed", "expert_mlp"),
    "down": ("layers", "experts", "expert_mlp", "embed"),
}
TOKENS = T * D * 2
"""Bytes of a device's tokens."""


def rules(experts: str | None = "expert") -> Rules:
    return preset("ddp").replace(
        "experts",
        params={"experts": experts, "expert_mlp": None},
        activations={"batch": ("data", "expert"), "experts": experts, "expert_mlp": None},
        exchange={experts: "padded"} if experts else {},
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step of layers with experts only. The defaults have no fault."""

    exchange: str = "padded"
    """padded, gather, or weights: the experts travel, not the tokens."""
    names: tuple[str, ...] = ("received", "up")
    """What the backward pass does not recompute; empty: it recomputes everything."""
    weight_spec: P = P("expert")
    """Of the experts where they are used."""
    stored: str | None = "expert"
    """Mesh axis that shards the stored experts."""
    n_experts: int = E
    n_tokens: int = T
    """Of a device."""
    ragged: bool = False
    """Rows are sorted by expert, and multiplied by `lax.ragged_dot`."""

    def report(self) -> Report:
        mesh = h100(expert=G)

        def array(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

        params = {
            "up": array((L, self.n_experts, D, F), jnp.float32, None, self.stored),
            "down": array((L, self.n_experts, F, D), jnp.float32, None, self.stored),
        }
        batch = {"x": array((G * self.n_tokens, D), jnp.bfloat16, "expert")}
        experts = jax.shard_map(
            self._experts,
            mesh=mesh,
            in_specs=(P("expert"), self.weight_spec, self.weight_spec),
            out_specs=P("expert"),
        )

        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            up = w["up"].astype(jnp.bfloat16)
            down = w["down"].astype(jnp.bfloat16)
            with jax.named_scope(EXPERTS):
                return x + experts(jax.nn.silu(x), up, down), None

        policy = None
        if self.names:
            policy = jax.checkpoint_policies.save_only_these_names(*self.names)

        def loss(params: Any, batch: Any) -> jax.Array:
            with jax.named_scope("layers"):
                x, _ = lax.scan(jax.checkpoint(layer, policy=policy), batch["x"], params)
            return jnp.square(x.astype(jnp.float32)).mean()

        def step(params: Any, batch: Any) -> Any:
            grads = jax.grad(loss)(params, batch)
            return jax.tree.map(lambda w, g: w - g, params, grads)

        jitted = jax.jit(step, out_shardings={name: w.sharding for name, w in params.items()})
        return compile_report(jitted, params, batch, mesh=mesh, vocabulary=VOCABULARY)

    def _experts(self, x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        received = x
        if self.exchange == "padded":
            received = lax.all_to_all(x, "expert", 0, 0, tiled=True)
        elif self.exchange == "gather":
            received = lax.all_gather(x, "expert", tiled=True)
        else:
            up = lax.all_gather(up, "expert", tiled=True)
            down = lax.all_gather(down, "expert", tiled=True)
        received = checkpoint_name(received, "received")
        if self.ragged:
            sizes = jnp.full(len(up), len(received) // len(up), jnp.int32)
            h = checkpoint_name(lax.ragged_dot(received, up, sizes), "up")
            y = lax.ragged_dot(jax.nn.gelu(h), down, sizes)
        else:
            h = jnp.einsum("etd,edf->etf", received.reshape(len(up), -1, D), up)
            h = checkpoint_name(h, "up")
            y = jnp.einsum("etf,efd->etd", jax.nn.gelu(h), down).reshape(received.shape)
        if self.exchange == "padded":
            return lax.all_to_all(y, "expert", 0, 0, tiled=True)
        if self.exchange == "gather":
            return lax.psum_scatter(y, "expert", tiled=True)
        return y


def findings(program: Program, program_rules: Rules | None) -> tuple[Finding, ...]:
    return lint(program.report(), program_rules, AXES)


@pytest.mark.parametrize("exchange", ["padded", "gather"])
def test_saved_exchanges_and_sharded_experts_are_no_finding(exchange: str) -> None:
    assert findings(Program(exchange), rules()) == ()


@pytest.mark.parametrize(
    ("exchange", "kind", "sent"),
    [
        ("padded", f"all-to-all of bf16[{T},{D}]", (G - 1) / G * TOKENS),
        ("gather", f"all-gather of bf16[{G * T},{D}]", (G - 1) * TOKENS),
    ],
)
def test_an_exchange_that_no_name_saves_is_repeated(exchange: str, kind: str, sent: float) -> None:
    one = only(findings(Program(exchange, names=("up",)), rules()))
    assert one.check == "exchange-repeated" and one.severity == "error"
    assert one.text.startswith(f"the {kind} over expert") and f"{L} times in a step" in one.text
    assert one.bytes == L * sent and one.where.phase == "recompute"
    assert "checkpoint_name" in one.fix


def test_a_recompute_of_everything_has_the_exchanges_too() -> None:
    program = Program(names=())
    report = program.report()
    assert report.count("all-to-all", phase="recompute") == L
    assert lint(report, rules(), AXES) == ()


def test_experts_that_are_gathered_for_use() -> None:
    by_hand = findings(Program("weights"), rules())
    one = next(one for one in by_hand if one.check == "experts-replicated")
    assert one.severity == "error" and one.bytes >= L * (G - 1) * 2 * E // G * D * F * 2
    assert "all experts of down, up are gathered over expert" in one.text
    by_xla = only(findings(Program(weight_spec=P(None)), rules()))
    assert by_xla.check == "experts-replicated" and "gathered over expert" in by_xla.text


def test_experts_that_no_row_shards() -> None:
    program = Program(weight_spec=P(None), stored=None)
    report = program.report()
    one = only(lint(report, rules(None), AXES))
    assert one.check == "experts-replicated" and one.severity == "error"
    assert "down, up are replicated along expert, whose 8 devices" in one.text
    assert one.bytes == L * 2 * E * D * F * 4 * (G - 1) // G
    assert "rules.params['experts']" in one.fix

    # Seven devices cannot share sixteen experts, and along another axis they are sharded.
    odd = {**report.mesh, "expert": 7}
    assert not _has_replicated(dataclasses.replace(report, mesh=odd), rules(None))
    other = dataclasses.replace(report, mesh={**report.mesh, "data": 2})
    assert not _has_replicated(other, rules("data"))
    # Without names of the dimensions nothing tells what an expert is.
    assert "experts-replicated" not in {one.check for one in lint(report, rules(None), {})}
    # A parameter that several experts share is no expert.
    shared = tuple(map(_without_experts, report.arguments))
    assert not _has_replicated(dataclasses.replace(report, arguments=shared), rules(None))


def test_rows_that_are_there_once_for_each_expert() -> None:
    """XLA has no grouped matmul for GPUs: it multiplies all rows by all experts."""
    n_experts = 8  # of a device
    n_tokens = 4096
    batched = Program(n_experts=n_experts * G, n_tokens=n_tokens)
    assert findings(batched, rules()) == (), "each row once, in a dimension of experts"
    report = dataclasses.replace(batched, ragged=True).report()
    one = only(lint(report, rules(), AXES))
    assert one.check == "dense-experts" and one.severity == "error"
    assert f"each of the {n_experts} experts" in one.text and "grouped kernel" in one.fix
    flops = 2 * n_tokens * D * F * 2 * L
    assert report.flops["forward"] == n_experts * flops
    # Without names of the dimensions nothing tells what an expert is.
    assert lint(report, rules(), {}) == ()

    # A gradient of all experts is as large, where an expert is wider than there are tokens.
    gradient = f"bf16[{n_experts},{D},{F}]"
    buffers = [
        dataclasses.replace(buffer, shape=gradient) if "[" in buffer.shape else buffer
        for buffer in report.memory.buffers
    ]
    memory = dataclasses.replace(report.memory, buffers=tuple(buffers))
    batch = tuple(
        dataclasses.replace(a, shape=(G * 128, D)) if a.kind == "batch" else a
        for a in report.arguments
    )
    few_tokens = dataclasses.replace(report, memory=memory, arguments=batch, collectives=())
    assert lint(few_tokens, rules(), AXES) == ()


def _has_replicated(report: Report, program_rules: Rules) -> bool:
    found = lint(report, program_rules, AXES)
    return "experts-replicated" in {one.check for one in found}


def _without_experts(argument: Argument) -> Argument:
    if argument.kind != "params":
        return argument
    return dataclasses.replace(argument, shape=(L, *argument.shape[2:]))
