"""Rules beyond the presets equal one device: tables gathered over axes that do not shard the batch,
a sequence sharded over two axes, mesh axes that the rules declare, scoped rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.model import DecoderConfig
from sharding_rules import Rules, Shard, ShardingRuleError, preset

COMPILE_BUDGET = 60

_WHOLE_TABLES: dict[str, Any] = {"gathered": {"vocab": None}, "activations": {"vocab": None}}
_SQUARE: dict[str, Any] = {"data": 2, "tensor": 2, "extra": ("tensor_y=2",)}
_BOTH = ("tensor", "tensor_y")
_TWICE: dict[str, Any] = {"mlp": _BOTH, "vocab": _BOTH}
CASES: dict[str, tuple[DecoderConfig, Rules, dict[str, Any]]] = {
    # Columns of both tables gathered over an axis that shards the sequence, but not the batch.
    "embed over the sequence's axis, gathered": (
        GPT,
        preset("ddp").replace(
            params={"embed": "fsdp"}, gathered={"embed": None}, activations={"seq_resid": "fsdp"}
        ),
        {"fsdp": 2},
    ),
    # Rows gathered over an axis along which the activations are replicated.
    "vocab over tensor, gathered": (
        GPT,
        preset("megatron_sp").replace(**_WHOLE_TABLES),
        {"tensor": 2},
    ),
    "vocab over tensor and fsdp, gathered": (
        LLAMA,
        preset("hsdp+megatron").replace(
            params={"vocab": ("tensor", "fsdp"), "embed": None}, **_WHOLE_TABLES
        ),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ),
    # The vocabulary's axis comes second in the sequence's order.
    "seq_resid over fsdp, then tensor": (
        GPT,
        preset("megatron").replace(activations={"seq_resid": ("fsdp", "tensor")}),
        {"fsdp": 2, "tensor": 2},
    ),
    # Declared mesh axes: 2D tensor parallelism, weights stored in more shards than they are used
    # in, another data axis.
    "mlp and vocab over tensor and tensor_y": (
        LLAMA,
        preset("megatron_sp").replace(
            axes={"tensor_y": "auto"}, params=_TWICE, activations=_TWICE | {"seq_resid": _BOTH}
        ),
        _SQUARE,
    ),
    "embed over tensor_y, gathered": (
        GPT,
        preset("megatron_sp").replace(
            axes={"tensor_y": "auto"},
            params={"embed": "tensor_y"},
            gathered={"embed": None},
            activations={"seq_resid": _BOTH},
        ),
        _SQUARE,
    ),
    "batch over a declared manual axis": (
        GPT,
        preset("hsdp").replace(
            axes={"replica": "manual"}, activations={"batch": ("data", "fsdp", "replica")}
        ),
        {"data": 2, "fsdp": 2, "extra": ("replica=2",)},
    ),
    "seq_resid over tensor, then fsdp": (
        LLAMA,
        preset("megatron").replace(activations={"seq_resid": ("tensor", "fsdp")}),
        {"fsdp": 2, "tensor": 2},
    ),
}


FAST = ("vocab over tensor, gathered", "mlp and vocab over tensor and tensor_y")
FULL = ("seq_resid over fsdp, then tensor", "embed over tensor_y, gathered")


def marks(case: str) -> Any:
    return () if case in FAST else pytest.mark.exhaustive if case in FULL else pytest.mark.slow


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in CASES])
def test_equals_one_device(case: str) -> None:
    config, rules, mesh = CASES[case]
    params, wanted_sums, wanted = reference(config)
    _, sums, grads = gradients(config, shard_on(rules, **mesh), 2, params=params)
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted)


def test_parts_of_a_model_with_rules_of_their_own_equal_one_device() -> None:
    """Two matrices of one segment are sharded in two dimensions, also when used; in the other
    segment they are replicated."""
    rules = preset("megatron").replace(
        axes={"tensor_y": "auto"},
        params={"square/embed": "tensor_y", "whole/mlp": None},
        gathered={"square/embed": "tensor_y", "whole/mlp": None},
        activations={"whole/mlp": None},
    )
    shard = shard_on(rules, **_SQUARE)
    axes, scopes = ("embed", "mlp"), ("square", "whole")
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 8, 16)).astype(np.float32)
    weights = {
        f"{scope}.{name}": random.normal(size=(16, 32)).astype(np.float32) / 4
        for scope in scopes
        for name in ("up", "down")
    }

    def loss(weights: dict[str, jax.Array], x: jax.Array, shard: Shard) -> jax.Array:
        for scope in scopes:
            part = shard.within(scope)
            up, down = (part.weight(weights[f"{scope}.{name}"], *axes) for name in ("up", "down"))
            h = part(jnp.tanh(jnp.einsum("bsd,df->bsf", x, up)), "batch", "seq", "mlp")
            x = part(x + jnp.einsum("bsf,df->bsd", h, down), "batch", "seq_resid", "embed")
        return jnp.square(x).sum()

    where = {
        name: shard.within(name.split(".")[0]).sharding("params", axes, w.shape, name)
        for name, w in weights.items()
    }
    assert [where[name].spec for name in ("square.up", "whole.up")] == [
        jax.P("tensor_y", "tensor"),
        jax.P(None, None),
    ]
    batch = shard.sharding("activations", ("batch", "seq", "embed"), x.shape)
    found = jax.jit(
        jax.grad(partial(loss, shard=shard)), in_shardings=(where, batch), out_shardings=where
    )(weights, x)
    alone = shard_on(rules, **_SQUARE | {"data": 1, "tensor": 1, "extra": ("tensor_y=1",)})
    wanted = jax.jit(jax.grad(partial(loss, shard=alone)))(weights, x)
    assert_same_gradients(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted))


def test_a_table_used_in_parts_along_the_batch_is_refused() -> None:
    rules = preset("fsdp").replace(
        params={"vocab": "fsdp", "embed": None}, gathered={"vocab": "fsdp"}
    )
    shard: Shard = shard_on(rules, fsdp=2)
    with pytest.raises(ShardingRuleError) as caught:
        shard.table("vocab", "embed")
    assert str(caught.value) == (
        "rules.gathered['vocab']='fsdp' has 'fsdp', which shards the batch: a table is gathered "
        "over the axes of the batch; leave 'fsdp' out"
    )
