"""Programs in plain JAX with nothing wrong, most with collectives written by hand, on mesh axes of
their own: lint must be silent.

Sizes: M microbatches, B batch, S sequence, D embed, F mlp, L layers, N heads, H head width, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.sharding_rules.lab.plants.plain import (
    DATA_PARALLEL,
    FULLY_SHARDED,
    TENSOR_PARALLEL,
    Arrays,
    Plain,
    mesh_of,
    pin,
)

B, S, D, F, L, N, H, M = 16, 512, 1024, 4096, 4, 16, 64, 4
BF16, F32 = jnp.bfloat16, jnp.float32


def local(
    mesh: Mesh, f: Callable[..., Any], in_specs: Any, out_specs: Any, **more: Any
) -> Callable[..., Any]:
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **more
    )


def rotated(axis: str, step: int = 1) -> list[tuple[int, int]]:
    n = lax.axis_size(axis)
    return [(i, (i + step) % n) for i in range(n)]


def square(y: jax.Array) -> jax.Array:
    return jnp.square(y.astype(F32)).mean()


def ring_matmul(mesh: Mesh) -> Callable[..., Any]:
    """An all-gather that is hidden behind the matmul that takes it: each chunk is multiplied while
    the next one travels."""

    def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
        n, me = lax.axis_size("model"), lax.axis_index("model")

        def turn(carry: Any, i: jax.Array) -> tuple[Any, None]:
            chunk, y = carry
            y = lax.dynamic_update_slice_in_dim(y, chunk @ w, (me + i) % n * chunk.shape[0], 0)
            return (lax.ppermute(chunk, "model", rotated("model", -1)), y), None

        start = x, jnp.zeros((n * x.shape[0], w.shape[1]), x.dtype)
        return lax.scan(turn, start, jnp.arange(n))[0][1]

    def of(params: Arrays, batch: jax.Array) -> jax.Array:
        return square(
            local(
                mesh, gathered, (P(("replica", "model")), P(None, "model")), P("replica", "model")
            )(batch, params["up"])
        )

    return jax.grad(of)


def ulysses(mesh: Mesh) -> Callable[..., Any]:
    """Attention with the sequence sharded outside and the heads inside (Jacobs et al., arXiv
    2309.14509): all-to-alls either side."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (lax.all_to_all(x, "seq", 2, 1, tiled=True) for x in (q, k, v))
        y = jnp.einsum(
            "bnst,btnh->bsnh", jax.nn.softmax(jnp.einsum("bsnh,btnh->bnst", q, k), -1), v
        )
        return lax.all_to_all(y, "seq", 1, 2, tiled=True)

    def of(params: Arrays, batch: jax.Array) -> jax.Array:
        spec = P("dp", "seq")
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dfnh->bsfnh", batch, params["qkv"]), 2, 0)
        y = local(mesh, attention, (spec,) * 3, spec)(q, k, v)
        return square(jnp.einsum("bsnh,nhd->bsd", y, params["out"]))

    return jax.grad(of)


def experts(mesh: Mesh) -> Callable[..., Any]:
    """A mixture of experts with as many tokens for each: tokens go to their expert's device and
    come back."""

    def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        sent = lax.all_to_all(x.reshape(lax.axis_size("experts"), -1, D), "experts", 0, 0)
        y = jax.nn.gelu(sent.reshape(-1, D) @ up[0]) @ down[0]
        return lax.all_to_all(y.reshape(sent.shape), "experts", 0, 0).reshape(x.shape)

    def of(params: Arrays, batch: jax.Array) -> jax.Array:
        cut = P(("dp", "experts"))
        return square(
            local(mesh, layer, (cut, P("experts"), P("experts")), cut)(
                batch, params["up"], params["down"]
            )
        )

    return jax.grad(of)


def ragged(mesh: Mesh) -> Callable[..., Any]:
    """Tokens to experts, as many as each is sent: the sizes are data."""

    def route(x: jax.Array, sizes: jax.Array) -> jax.Array:
        n, rows = lax.axis_size("experts"), x.shape[0]
        mine = sizes.reshape(-1)
        offsets = jnp.cumsum(mine) - mine
        theirs = lax.all_to_all(mine, "experts", 0, 0, tiled=True)
        start = lax.all_to_all(jnp.cumsum(theirs) - theirs, "experts", 0, 0, tiled=True)
        return lax.ragged_all_to_all(
            x, jnp.zeros((n * rows, D), x.dtype), offsets, mine, start, theirs, axis_name="experts"
        )

    def step(params: Arrays, batch: jax.Array, sizes: jax.Array) -> jax.Array:
        routed = local(mesh, route, (P("experts"), P("experts")), P("experts"))(batch, sizes)
        return square(jax.nn.gelu(routed @ params["up"]))

    return step


def hierarchical(mesh: Mesh) -> Callable[..., Any]:
    """Gradients summed first among the eight of a node, then between the nodes, by groups of one
    axis."""
    node = [list(range(8)), list(range(8, 16))]
    across = [[i, i + 8] for i in range(8)]

    def summed(params: Arrays, x: jax.Array) -> Arrays:
        grads = jax.grad(lambda p: square(jax.nn.gelu(x @ p["up"]) @ p["down"]))(params)

        def one(g: jax.Array) -> jax.Array:
            part = lax.psum_scatter(g, "workers", axis_index_groups=node, tiled=True)
            part = lax.psum(part, "workers", axis_index_groups=across)
            return lax.all_gather(part, "workers", axis_index_groups=node, tiled=True)

        return jax.tree.map(lambda w, g: w - 0.1 * one(g), params, grads)

    return local(mesh, summed, (P(), P("workers")), P())


def megatron_by_hand(mesh: Mesh) -> Callable[..., Any]:
    """Column- and row-parallel matmuls with one sum between them (Shoeybi et al., arXiv
    1909.08053), and gradients summed over dp."""

    def grads(params: Arrays, x: jax.Array) -> Arrays:
        def of(params: Arrays) -> jax.Array:
            def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
                return x + lax.psum(jax.nn.gelu(x @ w["up"]) @ w["down"], "tp"), None

            return square(lax.scan(layer, x, params)[0])

        return lax.psum(jax.grad(of)(params), "dp")

    specs = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    return local(mesh, grads, (specs, P("dp")), specs)


def sequence_parallel_by_hand(mesh: Mesh) -> Callable[..., Any]:
    """The same with the residual stream sharded along the sequence (Korthikanti et al., arXiv
    2205.05198)."""

    def grads(params: Arrays, x: jax.Array) -> Arrays:
        def of(params: Arrays) -> jax.Array:
            def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
                h = jax.nn.gelu(lax.all_gather(x, "tp", axis=1, tiled=True) @ w["up"])
                return x + lax.psum_scatter(
                    h @ w["down"], "tp", scatter_dimension=1, tiled=True
                ), None

            return square(lax.scan(layer, x, params)[0])

        return lax.psum(jax.grad(of)(params), "dp")

    specs = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    return local(mesh, grads, (specs, P("dp", "tp")), specs)


def zero_by_hand(mesh: Mesh) -> Callable[..., Any]:
    """ZeRO-1 (Rajbhandari et al., arXiv 1910.02054): gradients are scattered, each worker updates
    its part, new weights are gathered."""

    def step(params: Arrays, mu: Arrays, x: jax.Array) -> tuple[Arrays, Arrays]:
        grads = jax.grad(
            lambda p: square(jax.nn.gelu(x @ p["up"].astype(BF16)) @ p["down"].astype(BF16))
        )(params)
        grads = jax.tree.map(lambda g: lax.psum_scatter(g, "workers", tiled=True), grads)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
        size = {name: m.shape[0] for name, m in mu.items()}
        part = {
            n: lax.dynamic_slice_in_dim(w, lax.axis_index("workers") * size[n], size[n])
            - 0.1 * mu[n]
            for n, w in params.items()
        }
        return jax.tree.map(lambda w: lax.all_gather(w, "workers", tiled=True), part), mu

    return local(mesh, step, (P(), P("workers"), P("workers")), (P(), P("workers")))


def gpipe(mesh: Mesh) -> Callable[..., Any]:
    """Stages that send activations to the next in each tick, all forward passes before all backward
    (Huang et al., arXiv 1811.06965)."""

    def loss(params: Arrays, x: jax.Array) -> jax.Array:
        stage, n = lax.axis_index("stage"), lax.axis_size("stage")

        def tick(y: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.where(
                stage == 0, x[jnp.clip(t, 0, M - 1)], lax.ppermute(y, "stage", rotated("stage"))
            )
            y = y + jax.nn.gelu(y @ params["up"][0]) @ params["down"][0]
            return y, jnp.where((stage == n - 1) & (t >= n - 1), square(y), 0.0)

        return lax.psum(
            lax.scan(jax.checkpoint(tick), jnp.zeros_like(x[0]), jnp.arange(M + n - 1))[1].sum(),
            "stage",
        )

    def grads(params: Arrays, x: jax.Array) -> Arrays:
        return lax.psum(jax.grad(loss)(params, x), "dp")

    return local(mesh, grads, (P("stage"), P(None, "dp")), P("stage"))


def nested(mesh: Mesh) -> Callable[..., Any]:
    """Manual over the replicas outside, and over the model inside."""

    def inner(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.psum(jax.nn.gelu(x @ up) @ down, "model")

    def outer(params: Arrays, x: jax.Array) -> Arrays:
        tensor = jax.shard_map(
            inner, in_specs=(P(), P(None, "model"), P("model")), out_specs=P(),
            axis_names={"model"}, check_vma=False
        )  # fmt: skip
        return lax.psum(
            jax.grad(lambda p: square(tensor(x, p["up"], p["down"])))(params), "replica"
        )

    return local(mesh, outer, (P(), P("replica")), P(), axis_names={"replica"})


def bf16_sums(mesh: Mesh) -> Callable[..., Any]:
    """Gradients accumulated over microbatches in float32, and summed once over the workers in
    bfloat16, which is what was asked for."""

    def step(params: Arrays, x: jax.Array) -> Arrays:
        def microbatch(total: Arrays, x: jax.Array) -> tuple[Arrays, None]:
            grads = jax.grad(
                lambda p: square(jax.nn.gelu(x @ p["up"].astype(BF16)) @ p["down"].astype(BF16))
            )(params)
            return jax.tree.map(jnp.add, total, grads), None

        grads = lax.scan(microbatch, jax.tree.map(jnp.zeros_like, params), x)[0]
        return jax.tree.map(
            lambda w, g: w - 0.1 * lax.psum(g.astype(BF16), "workers").astype(F32), params, grads
        )

    return local(mesh, step, (P(), P(None, "workers")), P())


def ring_attention(mesh: Mesh) -> Callable[..., Any]:
    """Keys and values go around the ring, and softmax is put together as they come (Liu et al.,
    arXiv 2310.01889)."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def turn(carry: Any, _: None) -> tuple[Any, None]:
            k, v, y, top, total = carry
            scores = jnp.einsum("bsnh,btnh->bnst", q, k).astype(F32)
            new = jnp.maximum(top, scores.max(-1))
            p, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            y = y * jnp.moveaxis(scale, 1, 2)[..., None] + jnp.einsum(
                "bnst,btnh->bsnh", p.astype(v.dtype), v
            ).astype(F32)
            k, v = (lax.ppermute(x, "ring", rotated("ring")) for x in (k, v))
            return (k, v, y, new, total * scale + p.sum(-1)), None

        start = (
            k,
            v,
            jnp.zeros(q.shape, F32),
            jnp.full((q.shape[0], N, q.shape[1]), -1e30),
            jnp.zeros((q.shape[0], N, q.shape[1])),
        )
        _, _, y, _, total = lax.scan(turn, start, None, length=lax.axis_size("ring"))[0]
        return (y / jnp.moveaxis(total, 1, 2)[..., None]).astype(q.dtype)

    def of(params: Arrays, batch: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dfnh->bsfnh", batch, params["qkv"]), 2, 0)
        y = local(mesh, attend, (P("dp", "ring"),) * 3, P("dp", "ring"))(q, k, v)
        return square(jnp.einsum("bsnh,nhd->bsd", y, params["out"]))

    return jax.grad(of)


def summa(mesh: Mesh) -> Callable[..., Any]:
    """A matmul sharded in two dimensions: each device gathers its row of x and its column of w (van
    de Geijn and Watts, 1997)."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_gather(x, "column", axis=1, tiled=True) @ lax.all_gather(
            w, "row", axis=0, tiled=True
        )

    def of(params: Arrays, batch: jax.Array) -> jax.Array:
        return square(
            local(mesh, product, (P("row", "column"),) * 2, P("row", "column"))(batch, params["up"])
        )

    return jax.grad(of)


def halo(mesh: Mesh) -> Callable[..., Any]:
    """A convolution along a sharded sequence, whose neighbours send their edges."""

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        edge = lax.ppermute(x[:, -64:], "seq", [(i, i + 1) for i in range(15)])
        x = jnp.concatenate([edge, x], 1)
        return jnp.stack([x[:, i : i + S // 2] @ w[i // 16] for i in range(0, 64, 16)]).sum(0)

    def of(params: Arrays, batch: jax.Array) -> jax.Array:
        return square(
            local(mesh, convolved, (P(None, "seq"), P()), P(None, "seq"))(batch, params["w"])
        )

    return jax.grad(of)


def scalar_loss(mesh: Mesh) -> Callable[..., Any]:
    """Nothing but a scalar is summed: tp shards the matmul's output, of which the loss is a mean
    over both axes."""

    def step(params: Arrays, batch: jax.Array) -> jax.Array:
        return square(pin(mesh, jax.nn.gelu(batch @ params["up"]), "dp", None, "tp"))

    return step


MATRICES = {"up": ((D, F), BF16, P()), "down": ((F, D), BF16, P())}
MASTERS = {name: (shape, F32, spec) for name, (shape, _, spec) in MATRICES.items()}
LAYERS = {"up": ((L, D, F), BF16, P(None, None, "tp")), "down": ((L, F, D), BF16, P(None, "tp"))}
HEADS = {"qkv": ((D, 3, N, H), BF16, P()), "out": ((N, H, D), BF16, P())}
TOKENS = ((B * S, D), BF16, P("workers"))
STAGES = {"up": ((4, D, F), BF16, P("stage")), "down": ((4, F, D), BF16, P("stage"))}
EXPERTS = {"up": ((8, D, F), BF16, P("experts")), "down": ((8, F, D), BF16, P("experts"))}

VALID = (
    Plain(
        "ring matmul",
        partial(mesh_of, replica=2, model=8),
        ring_matmul,
        ({"up": ((D, F), BF16, P(None, "model"))}, ((B * S, D), BF16, P(("replica", "model")))),
    ),
    Plain(
        "ulysses",
        partial(mesh_of, dp=4, seq=4),
        ulysses,
        (HEADS, ((B, S, D), BF16, P("dp", "seq"))),
    ),
    Plain(
        "mixture of experts",
        partial(mesh_of, dp=2, experts=8),
        experts,
        (EXPERTS, ((B * S, D), BF16, P(("dp", "experts")))),
    ),
    Plain(
        "ragged exchange",
        partial(mesh_of, experts=16),
        ragged,
        (
            {"up": ((D, F), BF16, P())},
            ((B * S, D), BF16, P("experts")),
            ((16, 16), jnp.int32, P("experts")),
        ),
    ),
    Plain("hierarchical sums", partial(mesh_of, workers=16), hierarchical, (MATRICES, TOKENS)),
    Plain(
        "megatron by hand",
        partial(mesh_of, dp=2, tp=8),
        megatron_by_hand,
        (LAYERS, ((B, S, D), BF16, P("dp"))),
    ),
    Plain(
        "sequence parallel by hand",
        partial(mesh_of, dp=2, tp=8),
        sequence_parallel_by_hand,
        (LAYERS, ((B, S, D), BF16, P("dp", "tp"))),
    ),
    Plain(
        "zero by hand",
        partial(mesh_of, workers=16),
        zero_by_hand,
        (MASTERS, {n: (*m[:2], P("workers")) for n, m in MASTERS.items()}, TOKENS),
    ),
    Plain(
        "gpipe",
        partial(mesh_of, stage=4, dp=4),
        gpipe,
        (STAGES, ((M, B, S, D), BF16, P(None, "dp"))),
    ),
    Plain(
        "nested regions",
        partial(mesh_of, replica=2, model=8),
        nested,
        (
            {"up": ((D, F), BF16, P(None, "model")), "down": ((F, D), BF16, P("model"))},
            ((B, S, D), BF16, P("replica")),
        ),
    ),
    Plain(
        "bf16 sums",
        partial(mesh_of, workers=16),
        bf16_sums,
        (MASTERS, ((M, B, S, D), BF16, P(None, "workers"))),
    ),
    Plain(
        "ring attention",
        partial(mesh_of, dp=4, ring=4),
        ring_attention,
        (HEADS, ((B, S, D), BF16, P("dp", "ring"))),
    ),
    Plain(
        "matmul in two dimensions",
        partial(mesh_of, row=4, column=4),
        summa,
        ({"up": ((D, F), BF16, P("row", "column"))}, ((B * S, D), BF16, P("row", "column"))),
    ),
    Plain(
        "halo exchange",
        partial(mesh_of, seq=16),
        halo,
        ({"w": ((4, D, D), BF16, P())}, ((2, 8 * S, D), BF16, P(None, "seq"))),
    ),
    Plain(
        "scalar loss",
        partial(mesh_of, dp=2, tp=8),
        scalar_loss,
        ({"up": ((D, F), BF16, P(None, "tp"))}, ((B, S, D), BF16, P("dp"))),
    ),
    TENSOR_PARALLEL,
    FULLY_SHARDED,
    DATA_PARALLEL,
)
