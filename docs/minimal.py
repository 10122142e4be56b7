"""The complete idea: one mesh, one table of rules, a model that names its axes, one step. Learns
its own source, on eight CPU devices.

One string chooses the strategy; no line below changes with it, and neither do the losses:
    python docs/minimal.py        # fsdp+megatron: weights over fsdp, tensor; batch over data, fsdp
    python docs/minimal.py zero1  # weights are replicated; batch and moments over data
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sharding_rules import AXES, MeshConfig, Shard, make_mesh, preset

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
nnx.use_eager_sharding(False)  # our rules place the arrays, not Flax's
# batch, sequence, embed, heads, head width, mlp, vocabulary of bytes
B, S, D, N, H, F, V = 16, 64, 64, 4, 16, 256, 256

# Rules: a table, logical axis -> mesh axes. Mesh: the devices, over the mesh axes that the rules
# name; this model has no pipeline stages.
rules = preset(sys.argv[1] if len(sys.argv) > 1 else "fsdp+megatron")
first, *others = sorted(rules.mesh_axes() - {"pipeline"}, key=AXES.index)
mesh = MeshConfig(**{first: -1}, **dict.fromkeys(others, 2)).resolve(jax.device_count())
shard = Shard(rules, make_mesh(mesh))


# Model: every dimension of a weight has a name; shard(x, names...) constrains an activation,
# shard.weight gathers an FSDP weight.
def weight(rngs: nnx.Rngs, **dims: int) -> nnx.Param:
    return nnx.Param(
        0.05 * jax.random.normal(rngs.params(), tuple(dims.values())), out_sharding=tuple(dims)
    )


def use(w: nnx.Param) -> jax.Array:
    return shard.weight(w[...], *w.out_sharding)


def norm(x_BSD: jax.Array) -> jax.Array:
    return shard(
        x_BSD * jax.lax.rsqrt(jnp.square(x_BSD).mean(-1, keepdims=True) + 1e-6),
        "batch",
        "seq",
        "embed",
    )


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv, self.out = (
            weight(rngs, embed=D, fused=3, heads=N, head_dim=H),
            weight(rngs, heads=N, head_dim=H, embed=D),
        )
        self.up, self.down = weight(rngs, embed=D, mlp=F), weight(rngs, mlp=F, embed=D)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        qkv = shard(
            jnp.einsum("bsd,dfnh->fbsnh", norm(x_BSD), use(self.qkv)),
            "fused",
            "batch",
            "seq",
            "heads",
            "head_dim",
        )
        a_BSNH = shard(
            jax.nn.dot_product_attention(*qkv, is_causal=True), "batch", "seq", "heads", "head_dim"
        )
        x_BSD += shard(
            jnp.einsum("bsnh,nhd->bsd", a_BSNH, use(self.out)), "batch", "seq_resid", "embed"
        )
        h_BSF = shard(jax.nn.gelu(norm(x_BSD) @ use(self.up)), "batch", "seq", "mlp")
        return x_BSD + shard(h_BSF @ use(self.down), "batch", "seq_resid", "embed")


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table, self.positions = (
            weight(rngs, vocab=V, embed=D),
            weight(rngs, position=S, embed=D),
        )
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def loss(self, text_BS: jax.Array) -> jax.Array:
        x_BSD = shard(jax.nn.one_hot(text_BS[:, :-1], V), "batch", "seq", "vocab") @ use(
            self.table
        ) + use(self.positions)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV = shard(norm(x_BSD) @ use(self.table).T, "batch", "seq", "vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, text_BS[:, 1:]).mean()


# Step: weights, gradients and moments each live where their own column of the rules says; XLA
# inserts the collectives between them.
def places(tree: Any, column: Any) -> Any:
    return jax.tree.map(
        # no names: on every device, as Adam's counter
        lambda x: shard.sharding(column, getattr(x, "out_sharding", ()), x.shape),
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Param),
    )


def step(params: Any, moments: Any, text_BS: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(text_BS))(params)
    grads = jax.lax.with_sharding_constraint(grads, places(grads, "gradients"))
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss


graph, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))))
optimizer = optax.adamw(3e-3)
homes = places(shapes, "params"), places(jax.eval_shape(optimizer.init, shapes), "optimizer")
# each device makes its own part
params = jax.jit(lambda: nnx.state(Transformer(nnx.Rngs(0))), out_shardings=homes[0])()
moments = jax.jit(optimizer.init, out_shardings=homes[1])(params)
step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*homes, None))

up, mu = params.blocks[0].up, moments[0].mu.blocks[0].up
print(
    f"{rules.name} on {mesh}: up {up.out_sharding} {up.shape} is {up[...].sharding.spec}, its "
    f"moments are {mu[...].sharding.spec}"
)
text, random = np.fromfile(__file__, np.uint8), np.random.default_rng(0)
for n in range(81):
    batch = text[random.integers(len(text) - S, size=(B, 1)) + np.arange(S + 1)]
    params, moments, loss = step(
        params, moments, jax.device_put(batch, shard.sharding("activations", ("batch", None)))
    )
    if n % 10 == 0:
        print(f"step {n}: loss {loss:.6f}")
