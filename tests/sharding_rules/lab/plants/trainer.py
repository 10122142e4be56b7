"""Bugs planted into the real training step of two small layers, on 16 H100s. Sizes: B batch, S
sequence, D embed, F mlp, V vocabulary."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.config import LaunchConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig, decoder, dense, layers, mlp
from mesh_lm.parallel import flat, stack
from mesh_lm.parallel import tick as ring
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning import program
from sharding_rules import MeshConfig, Rules, Shard, preset
from sharding_rules.lab.flags import options
from sharding_rules.shard import TableSharding, local_block
from tests.sharding_rules.lab.plants.program import Compiled

GPT = DecoderConfig(
    n_layers=2, d_model=1024, n_heads=8, seq_len=512, vocab_size=8192, attention="xla",
    loss_chunk=512, biases=False, norm="rmsnorm"
)  # fmt: skip
LLAMA = dataclasses.replace(GPT, n_kv_heads=4, positions="rotary", activation="swiglu", tied=False)
PRESETS = {
    name: preset(name)
    for name in (
        "hsdp+megatron_sp",
        "zero2+megatron_sp",
        "distributed+megatron_sp",
        "zero1+megatron_sp",
    )
}


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One training step, as `train.py` runs it."""

    name: str
    model: DecoderConfig = GPT
    rules: Rules = PRESETS["hsdp+megatron_sp"]
    mesh: MeshConfig = MeshConfig(data=2, fsdp=2, tensor=4)
    pipeline: PipelineConfig = PipelineConfig()
    microbatches: int = 4
    rows: int = 16
    """Sequences of a microbatch."""

    def compile(self, reports: str) -> Compiled:
        config = TrainConfig(
            model=self.model, mesh=self.mesh, rules=self.rules, pipeline=self.pipeline,
            output="planted",
            train=TrainLoop(global_batch=self.microbatches * self.rows, microbatches=self.microbatches),
            launch=LaunchConfig(compile_cache=str(Path(reports).parent)),
        )  # fmt: skip
        made = program.Program.of(config, "h100", math.prod(self.mesh.sizes().values()))
        flags = options("pipeline") if self.mesh.pipeline > 1 else None
        return Compiled(made.compile(flags), self.rules, made.layout.axes)


HSDP = Step("gpt, hsdp+megatron_sp")
ONE_ROW = Step(
    "gpt, one sequence on a device",
    dataclasses.replace(GPT, biases=True, norm="layernorm"),
    mesh=MeshConfig(data=3, fsdp=2, tensor=4),
    rows=6,
)
"""Here the gradient of the learned positions, gathered over tensor in float32, has the shape of an
activation."""
GROUPED = Step("llama, hsdp+megatron_sp", LLAMA)
ZERO2 = Step(
    "gpt, zero2+megatron_sp", rules=PRESETS["zero2+megatron_sp"], mesh=MeshConfig(data=4, tensor=4)
)
DISTRIBUTED = Step(
    "gpt, distributed+megatron_sp",
    rules=PRESETS["distributed+megatron_sp"],
    mesh=MeshConfig(data=4, tensor=4),
)
STAGED = Step(
    "gpt, zero1+megatron_sp, two stages",
    rules=PRESETS["zero1+megatron_sp"],
    mesh=MeshConfig(pipeline=2, data=2, tensor=4),
)


def plain_cross_entropy(*pins: tuple[str | None, ...]) -> Callable[..., dict[str, jax.Array]]:
    """A loss as one writes it without a mesh in mind, its logits pinned to some rows of the
    rules."""

    def loss(
        x: jax.Array,
        head: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        shard: Shard,
        *,
        vocab_size: int,
        **_: Any,
    ) -> Any:
        z = jnp.einsum(
            "bsd,vd->bsv",
            x,
            shard.weight(head.astype(x.dtype), "vocab", "embed"),
            preferred_element_type=jnp.float32,
        )
        for pin in pins:
            z = shard(z, *pin)
        z = jnp.where(jnp.arange(z.shape[-1]) < vocab_size, z, -1e30)
        scores = jnp.take_along_axis(z, labels[..., None], -1)[..., 0] - jax.nn.logsumexp(z, -1)
        total = -(weights * scores).sum()
        return {"objective": total, "loss": total, "weight": weights.sum()}

    return loss


def logits_gathered(patch: pytest.MonkeyPatch) -> Step:
    patch.setattr(
        decoder,
        "cross_entropy",
        plain_cross_entropy(("batch", "seq", "vocab"), ("batch", "seq", None)),
    )
    return HSDP


def weights_gathered_in_f32(patch: pytest.MonkeyPatch) -> Step:
    def einsum_of(self: Shard, w: jax.Array, dtype: Any, axes: Any) -> Any:
        return jnp.einsum, lax.optimization_barrier(self.weight(w, *axes)).astype(dtype)

    patch.setattr(Shard, "einsum_of", einsum_of)
    return HSDP


def embed_and_mlp_swapped(patch: pytest.MonkeyPatch) -> Step:
    class Mlp(mlp.Mlp):
        def __init__(self, config: DecoderConfig, weights: layers.Weights, shard: Shard) -> None:
            super().__init__(config, weights, shard)
            d, f = config.d_model, config.d_mlp
            self.up = layers.Linear("bsd,df->bsf", weights, (d, f), ("mlp", "embed"), shard)
            self.down = layers.Linear(
                "bsf,df->bsd", weights, (d, f), ("mlp", "embed"), shard, bias_axes=("norm",)
            )

    patch.setattr(dense, "Mlp", Mlp)
    return HSDP


def stack_gathered_before_the_scan(patch: pytest.MonkeyPatch) -> Step:
    run_segment = stack.run_segment

    def gathered(model: Any, segment: Any, *rest: Any, **more: Any) -> Any:
        graph, params, others = nnx.split(getattr(model, segment.name), nnx.Param, ...)

        def whole(w: nnx.Param) -> nnx.Variable:
            return w.replace(model.shard.weight(w.get_value(), *w.get_metadata()["out_sharding"]))

        params = jax.tree.map(whole, params, is_leaf=lambda w: isinstance(w, nnx.Variable))
        setattr(model, segment.name, nnx.merge(graph, params, others))
        return run_segment(model, segment, *rest, **more)

    patch.setattr(stack, "run_segment", gathered)
    return HSDP


def head_in_a_transposed_layout(patch: pytest.MonkeyPatch) -> Step:
    class Decoder(decoder.Decoder):
        def __init__(self, config: DecoderConfig, shard: Shard, rngs: nnx.Rngs) -> None:
            super().__init__(config, shard, rngs)
            self.head = layers.Weights(config, rngs)(
                (config.d_model, config.padded_vocab), ("vocab", "embed"), cast=True
            )

        def _head(self) -> jax.Array:
            return self.head[...].T

    patch.setattr(decoder, "Decoder", Decoder)
    return GROUPED


def embedding_gradient_all_reduced(patch: pytest.MonkeyPatch) -> Step:
    def whole(self: TableSharding, dw: jax.Array) -> jax.Array:
        dw = lax.optimization_barrier(lax.psum(dw, self.batch_axes))
        for dim, names in enumerate(self.gather_axes):
            dw = local_block(dw, names, dim) if names else dw
        return dw

    patch.setattr(TableSharding, "reduce_scatter", whole)
    return HSDP


def mlp_activations_forgotten(patch: pytest.MonkeyPatch) -> Step:
    return dataclasses.replace(HSDP, rules=HSDP.rules.replace(activations={"mlp": None}))


def batch_gathered_over_fsdp(patch: pytest.MonkeyPatch) -> Step:
    def enter(self: dense.Layer, x_TD: jax.Array, ctx: Any) -> jax.Array:
        return self.shard(
            x_TD, *(None if axis == "batch" else axis for axis in ctx.tokens), "embed"
        )

    patch.setattr(dense.Layer, "_enter", enter)
    return HSDP


def moments_replicated(patch: pytest.MonkeyPatch) -> Step:
    # the package has a function of that name
    module = importlib.import_module("mesh_lm.state.parts")
    where = module._where

    def whole(layout: ModelLayout, kind: Any, name: str, leaf: Any) -> NamedSharding:
        return (
            NamedSharding(layout.shard.mesh, PartitionSpec())
            if kind == "optimizer"
            else where(layout, kind, name, leaf)
        )

    patch.setattr(module, "_where", whole)
    return HSDP


def lookup_by_indexing(patch: pytest.MonkeyPatch) -> Step:
    patch.setattr(
        decoder, "lookup", lambda table, ids, shard, axes, dtype: table.astype(dtype)[ids]
    )
    return HSDP


def cross_entropy_without_a_constraint(patch: pytest.MonkeyPatch) -> Step:
    patch.setattr(decoder, "cross_entropy", plain_cross_entropy())
    return HSDP


def hop_of_whole_sequences(patch: pytest.MonkeyPatch) -> Step:
    hop = ring.hop

    def whole(table: Any, x: jax.Array, step: int) -> jax.Array:
        pinned = (
            lax.with_sharding_constraint(y, PartitionSpec(None, None, None))
            for y in (x, hop(table, x, step))
        )
        return lax.optimization_barrier(tuple(pinned))[1]

    patch.setattr(ring, "hop", whole)
    return STAGED


def hop_in_f32(patch: pytest.MonkeyPatch) -> Step:
    hop = ring.hop

    def wide(table: Any, x: jax.Array, step: int) -> jax.Array:
        return lax.optimization_barrier(
            hop(table, lax.optimization_barrier(x.astype(jnp.float32)), step)
        ).astype(x.dtype)

    patch.setattr(ring, "hop", wide)
    return STAGED


def master_gathered_in_f32(patch: pytest.MonkeyPatch) -> Step:
    def all_gather(self: flat.FlatVector, piece: jax.Array) -> Any:
        def one(row: jax.Array) -> Any:
            whole = lax.optimization_barrier(lax.all_gather(row, self.replica_axes, tiled=True))
            return self.unpack(whole.astype(self.dtype))

        return self.map_rows(one, piece)

    patch.setattr(flat.FlatVector, "all_gather", all_gather)
    return DISTRIBUTED


def kv_heads_gathered(patch: pytest.MonkeyPatch) -> Step:
    return dataclasses.replace(GROUPED, rules=GROUPED.rules.replace(activations={"kv_heads": None}))


def gradients_all_reduced_for_zero2(patch: pytest.MonkeyPatch) -> Step:
    constrain = ModelLayout.constrain
    patch.setattr(
        ModelLayout,
        "constrain",
        lambda self, tree, kind: constrain(self, tree, "params" if kind == "gradients" else kind),
    )
    return ZERO2


def update_of_whole_weights(patch: pytest.MonkeyPatch) -> Step:
    constrain = ModelLayout.constrain

    def whole(self: ModelLayout, tree: Any, kind: Any) -> Any:
        if kind != "optimizer":
            return constrain(self, tree, kind)
        return {
            name: lax.with_sharding_constraint(x, NamedSharding(self.shard.mesh, PartitionSpec()))
            for name, x in tree.items()
        }

    patch.setattr(ModelLayout, "constrain", whole)
    return HSDP


def residual_stream_not_sharded(patch: pytest.MonkeyPatch) -> Step:
    def add(
        self: dense.Layer, x_TD: jax.Array, y_TD: jax.Array, dropout: Any, site: int, ctx: Any
    ) -> jax.Array:
        return self.shard(x_TD + y_TD.astype(x_TD.dtype), *ctx.tokens, "embed")

    patch.setattr(dense.Layer, "_add", add)
    return HSDP


def scale_of_the_gathered_weight(patch: pytest.MonkeyPatch) -> Step:
    def einsum_of(self: Shard, w: jax.Array, dtype: Any, axes: Any) -> Any:
        scale = lax.stop_gradient(jnp.abs(lax.optimization_barrier(self.weight(w, *axes))).max())
        used = self.weight((w / scale).astype(dtype), *axes)
        return lambda equation, x, w: jnp.einsum(equation, x, w) * scale.astype(dtype), used

    patch.setattr(Shard, "einsum_of", einsum_of)
    return HSDP
