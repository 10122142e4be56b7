"""Training steps in plain JAX with mesh axes of their own, and bugs planted into them. No rules:
lint sees what the arguments show.

Sizes: M microbatches, B batch, S sequence, D embed, F mlp, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding_rules.lab import compile_report
from sharding_rules.lab.targets import devices
from tests.sharding_rules.lab.plants.program import H100S, Compiled

M, B, S, D, F, L = 4, 16, 512, 1024, 4096, 4
Arrays = dict[str, Any]


def mesh_of(**axes: int) -> Mesh:
    """The H100s in order, outermost axis first."""
    return Mesh(
        np.array(devices("h100", H100S)).reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def mesh_inside_out(**axes: int) -> Mesh:
    """The axes as named, but neighbours along the first are neighbours in a node."""
    mesh = mesh_of(**dict(reversed(axes.items())))
    return Mesh(mesh.devices.T, tuple(axes), axis_types=mesh.axis_types)


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """A step function, its mesh, and its arguments as (shape, dtype, spec) in a tree."""

    name: str
    mesh: Callable[[], Mesh]
    step: Callable[[Mesh], Callable[..., Any]]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()

    def compile(self, reports: str) -> Compiled:
        mesh = self.mesh()

        def array(leaf: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
            shape, dtype, spec = leaf
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        arguments = jax.tree.map(
            array, self.arguments, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[-1], P)
        )
        step = jax.jit(self.step(mesh), donate_argnums=self.donate)
        return Compiled(compile_report(step, *arguments, mesh=mesh, name=self.name, cache=reports))


def pin(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


# Tensor and data parallelism: a stack of MLPs, SGD with momentum.


def mlp(mesh: Mesh, x: jax.Array, w: Arrays, hidden: tuple[Any, ...]) -> jax.Array:
    h = pin(mesh, jax.nn.gelu(x @ w["up"].astype(x.dtype)), *hidden)
    return pin(mesh, x + h @ w["down"].astype(x.dtype), "dp", None, None)


def loss(
    mesh: Mesh, params: Arrays, batch: jax.Array, hidden: tuple[Any, ...] = ("dp", None, "tp")
) -> jax.Array:
    x = lax.scan(
        jax.checkpoint(lambda x, w: (mlp(mesh, x, w, hidden), None)),
        batch.astype(jnp.bfloat16),
        params,
    )[0]
    return jnp.square(x.astype(jnp.float32)).mean()


def sgd(
    of: Callable[..., jax.Array], mesh: Mesh, params: Arrays, mu: Arrays, batch: jax.Array
) -> tuple[Arrays, Arrays]:
    grads = jax.grad(partial(of, mesh))(params, batch)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, mu), mu


def step_of(of: Callable[..., jax.Array]) -> Callable[[Mesh], Callable[..., Any]]:
    return lambda mesh: lambda params, mu, batch: sgd(of, mesh, params, mu, batch)


TP = {
    "up": ((L, D, F), jnp.float32, P(None, None, "tp")),
    "down": ((L, F, D), jnp.float32, P(None, "tp", None)),
}
ACTIVATIONS = ((B, S, D), jnp.float32, P("dp"))
TENSOR_PARALLEL = Plain(
    "tensor parallel", partial(mesh_of, dp=2, tp=8), step_of(loss), (TP, TP, ACTIVATIONS), (0, 1)
)


def tensor_axis_outermost(_: pytest.MonkeyPatch) -> Plain:
    return dataclasses.replace(TENSOR_PARALLEL, mesh=partial(mesh_inside_out, dp=2, tp=8))


def batch_not_sharded(_: pytest.MonkeyPatch) -> Plain:
    def whole(mesh: Mesh, params: Arrays, batch: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
            h = pin(mesh, jax.nn.gelu(x @ w["up"].astype(x.dtype)), None, None, "tp")
            return pin(mesh, x + h @ w["down"].astype(x.dtype), None, None, None), None

        return jnp.square(
            lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params)[0].astype(
                jnp.float32
            )
        ).mean()

    return dataclasses.replace(
        TENSOR_PARALLEL, step=step_of(whole), arguments=(TP, TP, ((B, S, D), jnp.float32, P()))
    )


def down_sharded_as_up(_: pytest.MonkeyPatch) -> Plain:
    params = TP | {"down": ((L, F, D), jnp.float32, P(None, None, "tp"))}
    return dataclasses.replace(TENSOR_PARALLEL, arguments=(params, params, ACTIVATIONS))


def layers_disagree(_: pytest.MonkeyPatch) -> Plain:
    def moved(mesh: Mesh, params: Arrays, batch: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
            x = pin(mesh, x, "dp", None, None)
            h = pin(mesh, jax.nn.gelu(x @ w["up"].astype(x.dtype)), "dp", None, "tp")
            h = pin(mesh, h, "dp", "tp", None)
            h = pin(mesh, h * jax.nn.sigmoid(h.mean(1, keepdims=True)), "dp", None, "tp")
            return pin(mesh, x + h @ w["down"].astype(x.dtype), "dp", None, None), None

        return jnp.square(
            lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params)[0].astype(
                jnp.float32
            )
        ).mean()

    return dataclasses.replace(TENSOR_PARALLEL, step=step_of(moved))


# A table that every device holds whole.

HEADS, LONG = 16, 2048
BIAS = ((HEADS, LONG, LONG), jnp.float32, P("tp"))


def attention_step(mesh: Mesh) -> Callable[..., Any]:
    def of(params: Arrays, tables: Arrays, batch: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(
            jnp.einsum("bsd,dfnh->bsfnh", batch, params["qkv"].astype(batch.dtype)), 2, 0
        )
        scores = pin(mesh, jnp.einsum("bsnh,btnh->bnst", q, k), "dp", "tp", None, None) + tables[
            "bias"
        ].astype(batch.dtype)
        y = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, -1), v)
        y = jnp.einsum("bsnh,nhd->bsd", y, params["out"].astype(batch.dtype))
        return jnp.square(pin(mesh, y, "dp", None, None).astype(jnp.float32)).mean()

    return lambda params, tables, batch: jax.grad(of)(params, tables, batch)


BIASED = Plain(
    "attention with a bias", partial(mesh_of, dp=4, tp=4), attention_step,
    (
        {"qkv": ((D, 3, HEADS, 64), jnp.float32, P(None, None, "tp")), "out": ((HEADS, 64, D), jnp.float32, P("tp"))},
        {"bias": BIAS}, ((4, LONG, D), jnp.bfloat16, P("dp")),
    ),
)  # fmt: skip


def bias_table_replicated(_: pytest.MonkeyPatch) -> Plain:
    params, _, batch = BIASED.arguments
    return dataclasses.replace(BIASED, arguments=(params, {"bias": (*BIAS[:2], P())}, batch))


# Fully sharded data parallelism: weights and moments over "shard", as is the batch.


def fsdp_loss(
    mesh: Mesh, params: Arrays, batch: jax.Array, hidden: tuple[Any, ...] = ("shard", None, None)
) -> jax.Array:
    def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        # Without the barrier XLA gathers `up` in float32 where it is recomputed.
        up, down = (
            pin(mesh, lax.optimization_barrier(w[name].astype(x.dtype)), None, None)
            for name in ("up", "down")
        )
        h = pin(mesh, jax.nn.gelu(x @ up), *hidden)
        return pin(mesh, x + h @ down, "shard", None, None), None

    x = lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params)[0]
    return jnp.square(x.astype(jnp.float32)).mean()


def fsdp_step(
    of: Callable[..., jax.Array], cut: P = P(None, "shard")
) -> Callable[[Mesh], Callable[..., Any]]:
    """cut: of the moments."""

    def step(mesh: Mesh) -> Callable[..., Any]:
        def run(params: Arrays, mu: Arrays, batch: jax.Array) -> tuple[Arrays, Arrays]:
            params, mu = sgd(of, mesh, params, mu, batch)
            return {n: pin(mesh, w, None, "shard") for n, w in params.items()}, {
                n: pin(mesh, m, *cut) for n, m in mu.items()
            }

        return run

    return step


FSDP = {
    "up": ((L, D, F), jnp.float32, P(None, "shard")),
    "down": ((L, F, D), jnp.float32, P(None, "shard")),
}
FULLY_SHARDED = Plain(
    "fsdp",
    partial(mesh_of, shard=16),
    fsdp_step(fsdp_loss),
    (FSDP, FSDP, ((2 * B, S, D), jnp.float32, P("shard"))),
    (0, 1),
)


def hidden_not_sharded(_: pytest.MonkeyPatch) -> Plain:
    return dataclasses.replace(
        FULLY_SHARDED, step=fsdp_step(partial(fsdp_loss, hidden=(None, None, None)))
    )


def plain_moments_replicated(_: pytest.MonkeyPatch) -> Plain:
    whole = {name: (*leaf[:2], P()) for name, leaf in FSDP.items()}
    return dataclasses.replace(
        FULLY_SHARDED,
        step=fsdp_step(fsdp_loss, P()),
        arguments=(FSDP, whole, FULLY_SHARDED.arguments[2]),
    )


# Data parallelism by hand, with gradients accumulated over microbatches.


def by_hand(each: bool) -> Callable[[Mesh], Callable[..., Any]]:
    """each: gradients are averaged over devices in every microbatch, and once more at the end,
    which changes no number."""

    def step(mesh: Mesh) -> Callable[..., Any]:
        def local(params: Arrays, batch: jax.Array) -> Arrays:
            def of(params: Arrays, x: jax.Array) -> jax.Array:
                def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
                    return x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(
                        x.dtype
                    ), None

                return jnp.square(
                    lax.scan(jax.checkpoint(layer), x, params)[0].astype(jnp.float32)
                ).mean()

            def microbatch(total: Arrays, x: jax.Array) -> tuple[Arrays, None]:
                grads = jax.grad(of)(params, x.astype(jnp.bfloat16))
                grads = lax.pmean(grads, "workers") if each else grads
                return jax.tree.map(jnp.add, total, grads), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            grads = lax.pmean(lax.scan(microbatch, zeros, batch)[0], "workers")
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(None, "workers")), out_specs=P(), check_vma=False
        )

    return step


WHOLE = {"up": ((L, D, F), jnp.float32, P()), "down": ((L, F, D), jnp.float32, P())}
DATA_PARALLEL = Plain(
    "data parallel by hand",
    partial(mesh_of, workers=16),
    by_hand(each=False),
    (WHOLE, ((M, B, S, D), jnp.float32, P(None, "workers"))),
    (0,),
)


def gradients_averaged_in_each_microbatch(_: pytest.MonkeyPatch) -> Plain:
    return dataclasses.replace(DATA_PARALLEL, step=by_hand(each=True))
