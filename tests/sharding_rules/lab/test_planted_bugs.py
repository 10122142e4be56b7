"""Seven bugs, planted into the real training step for 16 H100s: each is found, by the check that is
for it, and no preset has one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh

from mesh_lm import state as states
from mesh_lm.config import OptimizerConfig
from mesh_lm.model import DecoderConfig, dense
from mesh_lm.model.attention import Attention
from mesh_lm.model.layers import Linear, Weights
from mesh_lm.optim import Optimizer
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training import step
from sharding_rules import Rules, Shard, ShardingRuleError, preset
from sharding_rules.lab import compile_report, h100
from sharding_rules.lab.lint import Finding, lint

COMPILE_BUDGET = 10
pytestmark = pytest.mark.deviceless

GPT = DecoderConfig(
    n_layers=2,
    d_model=1024,
    n_heads=8,
    seq_len=512,
    vocab_size=8192,
    attention="xla",
    remat="full",
    loss_chunk=512,
)
LLAMA = dataclasses.replace(
    GPT,
    n_kv_heads=4,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    biases=False,
    tied=False,
)
SMALL = dataclasses.replace(GPT, biases=False, norm="rmsnorm", remat="none")
"""What a bug is planted into: a third less to compile, and nothing that a bug needs is gone."""
RULES = preset("hsdp+megatron_sp")
MESH = {"data": 2, "fsdp": 2, "tensor": 4}
MICROBATCHES, ROWS = 4, 16


def findings(
    reports: str, rules: Rules, mesh: Mesh | None = None, config: DecoderConfig = SMALL
) -> tuple[Finding, ...]:
    """What lint says of a whole training step."""
    mesh = h100(**MESH) if mesh is None else mesh
    layout, optimizer = ModelLayout.of(config, Shard(rules, mesh)), Optimizer(OptimizerConfig(), 10)
    spec = engine.batch_sharding(layout).spec
    dtypes = {
        "tokens": jnp.int32,
        "labels": jnp.int32,
        "weights": jnp.float32,
        "sample_ids": jnp.uint32,
        "indices": jnp.int32,
    }
    shapes = {"sample_ids": (MICROBATCHES, ROWS), "indices": (MICROBATCHES, 1, config.seq_len)}
    batch = {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=jax.NamedSharding(mesh, engine.leaf_spec(spec, shape))
        )
        for name, dtype in dtypes.items()
        for shape in (shapes.get(name, (MICROBATCHES, ROWS, config.seq_len)),)
    }
    state = states.abstract_state(layout, optimizer)
    report = compile_report(
        step.train_step(layout, optimizer, 0), state, batch, mesh=mesh, cache=reports
    )
    return lint(report, rules, layout.axes)


def errors(found: tuple[Finding, ...]) -> dict[str, list[Finding]]:
    """By check."""
    return {
        one.check: [each for each in found if each.check == one.check]
        for one in found
        if one.severity == "error"
    }


@pytest.mark.parametrize(
    ("config", "name", "mesh"),
    [
        pytest.param(GPT, "hsdp+megatron_sp", MESH, marks=pytest.mark.exhaustive, id="gpt"),
        pytest.param(
            GPT,
            "hsdp+megatron_sp+reduce_float32",
            MESH,
            marks=pytest.mark.exhaustive,
            id="gpt, fp32 sums",
        ),
        pytest.param(
            LLAMA,
            "zero2+megatron_sp",
            {"data": 4, "tensor": 4},
            marks=pytest.mark.exhaustive,
            id="llama",
        ),
    ],
)
def test_presets_are_clean(
    reports: str, config: DecoderConfig, name: str, mesh: dict[str, int]
) -> None:
    """With everything that lint can be told; test_collectives.py has the other presets."""
    found = findings(reports, preset(name), h100(**mesh), config)
    assert not errors(found), "\n".join(map(str, found))
    # The one honest notice: data-parallel gradients are summed after the last microbatch, so
    # nothing is left to hide them behind.
    assert {one.check for one in found} <= {"exposed-communication"}, "\n".join(map(str, found))


class JointQkv(nnx.Module):
    """Bug 1: stored [D, 3N, H]; tensor cuts the joint dimension, and the reshape that parts q, k
    and v loses the cut."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.n_heads = config.n_heads
        shape = (config.d_model, 3 * config.n_heads, config.d_head)
        self.linear = Linear("bsd,dnh->bsnh", weights, shape, ("embed", "heads", "head_dim"), shard)

    def __call__(self, x: jax.Array, tokens: tuple[str, str]) -> jax.Array:
        y = self.linear(x, tokens)
        return y.reshape(*y.shape[:2], 3, self.n_heads, y.shape[-1])


class JointAttention(Attention):
    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        super().__init__(config, weights, shard)
        self.qkv: Any = JointQkv(config, weights, shard)


class FreeAttention(Attention):
    """Bug 2: the output is not held to its heads, and `out` not to its cut: XLA may cut the tokens
    instead, and then needs `out` whole."""

    def __call__(
        self,
        x: jax.Array,
        rope: Any,
        segment_ids: Any,
        window: Any,
        past: Any = None,
        tokens: Any = None,
    ) -> tuple[jax.Array, Any]:
        qkv = self.shard(self.qkv(x, tokens), *tokens, "fused", "heads", "head_dim")
        y = self._attend(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], segment_ids, window, None, None, None, tokens
        )
        y = self.shard(y, *("seq_resid" if axis == "seq" else axis for axis in tokens), None, None)
        return jnp.einsum("bsnh,dnh->bsd", y, self.out.weight[...].astype(x.dtype)), past


class NarrowShard(Shard):
    """Bug 7: a matmul by hand, whose gradient XLA sums in the type that the matmul returns."""

    def einsum_of(self, w: jax.Array, dtype: Any, axes: Any) -> Any:
        return jnp.einsum, self.weight(w.astype(dtype), *axes)


class NarrowAttention(Attention):
    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        super().__init__(config, weights, shard)
        self.qkv.shard = NarrowShard(shard.rules, shard.mesh, shard.scope)


def test_joint_qkv(reports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "Attention", JointAttention)
    found = errors(findings(reports, RULES))
    assert found.keys() == {"reshard"}
    (one,) = found["reshard"]
    assert one.text.startswith(
        "activation bf16[512,4,24,128] (seq, batch, heads, head_dim) is gathered over tensor"
    ), one
    assert (
        "next to the matmul with blocks.attention.qkv.linear.weight (and 1 other array there)"
        in one.text
    )
    assert all("attention" in one.where.part for one in found["reshard"]), found["reshard"]
    if jax.__version__ == "0.10.2":  # 0.11.2 names the line of the block that calls it
        assert all("test_planted_bugs.py" in one.where.source for one in found["reshard"])
    assert all("[D, 3, N, H], not [D, 3N, H]" in one.fix for one in found["reshard"])


@pytest.mark.slow
def test_narrow_sum(reports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "Attention", NarrowAttention)
    found = errors(findings(reports, preset("hsdp+megatron_sp+reduce_float32")))
    (one,) = found["reduction-dtype"]
    assert found.keys() == {"reduction-dtype"} and one.where.part.startswith("layers/")
    assert one.text.startswith(
        "gradients of blocks.attention.qkv.weight are summed in bf16 over fsdp;"
    )
    # of two layers, bf16, a quarter by tensor; half of it sent
    assert one.bytes == MICROBATCHES * 2 * (1024 * 3 * 1024 // 4 * 2) // 2
    assert "shard.einsum(equation, x, w, axes)" in one.fix


@pytest.mark.exhaustive
def test_missing_output_constraint(reports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "Attention", FreeAttention)
    found = errors(findings(reports, RULES))
    gathered = [
        one
        for one in found["reshard"]
        if one.text.startswith("blocks.attention.out.weight is gathered over tensor")
    ]
    assert (
        gathered
        and "rules.activations['heads']" in gathered[0].fix
        and "attention" in gathered[0].where.part
    )


@pytest.mark.slow
def test_misspelt_row(reports: str) -> None:
    """A row that no tensor has is no error for Rules, which do not know the model; "mlp" stays
    whole."""
    rules = RULES.replace(
        params={"mlp": None, "mpl": "tensor"}, activations={"mlp": None, "mpl": "tensor"}
    )
    found = errors(findings(reports, rules))
    (dead,) = found["dead-rule"]
    assert (
        "rules.params['mpl'] = 'tensor' shards nothing" in dead.text
        and "blocks.mlp.up.weight" in dead.text
    )
    assert dead.fix == "did you mean rules.params['mlp']?"
    assert "rules.params['mlp']" in found["replicated"][0].fix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"mlp": "tensro"}}, "mesh axis 'tensro' is not an axis of the mesh"),
        ({"parms": {"mlp": "tensor"}}, "the rules have no column 'parms'"),
    ],
)
def test_other_typos_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingRuleError, match=message):
        ModelLayout.of(GPT, Shard(RULES.replace(**change), h100(**MESH))).shardings("params")


@pytest.mark.exhaustive
def test_replicated_embedding(reports: str) -> None:
    found = errors(
        findings(reports, RULES.replace(params={"vocab": None}, activations={"vocab": None}))
    )
    (one,) = found["replicated"]
    assert found.keys() == {"replicated"} and one.text.startswith(
        "embedding is replicated along tensor"
    )
    # weight and two moments, a half each by fsdp; a quarter would do
    assert one.bytes == 3 * 8192 * 512 * 4 * 3 // 4
    assert "rules.params['vocab']" in one.fix


@pytest.mark.exhaustive
def test_reduction_in_each_microbatch(reports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = engine.manual_axes
    monkeypatch.setattr(engine, "manual_axes", lambda layout: by_hand(layout) - {"data"})
    found = errors(findings(reports, RULES))
    assert found.keys() == {"microbatch-reduction"}
    assert all(
        "summed over data in each of 4 microbatches" in one.text
        for one in found["microbatch-reduction"]
    )
    assert found["microbatch-reduction"][0].bytes > 50e6


@pytest.mark.exhaustive
def test_device_order(reports: str) -> None:
    mesh = h100(**MESH)
    devices = mesh.devices.reshape(4, 2, 2).transpose(1, 2, 0).reshape(mesh.devices.shape)
    found = errors(
        findings(reports, RULES, Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))
    )
    assert found.keys() == {"device-order"} and found["device-order"][0].bytes > 100e6
    assert (
        found["device-order"][0].text == "groups of 4 along tensor span 2 nodes; 1 would hold them"
    )
