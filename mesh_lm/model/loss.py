"""Cross-entropy over a sharded vocabulary, a chunk of tokens at a time.

The logits of a long batch are its largest tensor: 32 GiB in fp32 for 64k tokens at vocabulary 128k.
Here the logits of only `chunk` tokens exist at once. The gradient of a chunk is computed together
with its logits, so nothing is recomputed (three matmuls in all). The head's weight is gathered
once, and its gradient is reduced once, in fp32, after the last chunk. Chunks are slices of the
tokens: with slices of the vocabulary, tensor parallelism would add an all-to-all and an all-reduce
to each iteration.

Sizes: B batch, S sequence, D embed, V vocabulary; T tokens of one device, C a chunk of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.model.contract import Sums
from mesh_lm.model.embedding import gathered_residual, sum_into
from sharding_rules import TABLES, Shard, axes_of
from sharding_rules.shard import TableSharding


def cross_entropy(
    x_BSD: jax.Array,
    head_VD: jax.Array,
    labels_BS: jax.Array,
    weights_BS: jax.Array,
    shard: Shard,
    *,
    vocab_size: int,
    chunk: int = 1024,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Sums:
    """Weighted sums over the labels: "loss" (nats), "weight", "objective" = loss + z_loss, and
    "z_loss" (log Z squared) if it has a weight.

    x: final activations [B, S, D] in the compute type, sharded like the residual stream. head: fp32
    [V, D] with logical axes ("vocab", "embed"). labels: int32 [B, S] in [0, vocab_size); weights:
    float32 [B, S]. Rows of the head from vocab_size on are padding and get probability 0. Only
    "objective" is differentiable, with respect to x and head.
    """

    @jax.custom_vjp
    def f(x: jax.Array, head: jax.Array) -> tuple[jax.Array, Sums]:
        return run(x, head, with_grads=False)[0]

    def f_fwd(
        x: jax.Array, head: jax.Array
    ) -> tuple[tuple[jax.Array, Sums], tuple[jax.Array, jax.Array]]:
        return run(x, head, with_grads=True)

    def f_bwd(
        grads: tuple[jax.Array, jax.Array], dout: tuple[jax.Array, Sums]
    ) -> tuple[jax.Array, jax.Array]:
        dx, dhead = grads
        return (dx * dout[0]).astype(dx.dtype), dhead * dout[0]

    def run(x: jax.Array, head: jax.Array, with_grads: bool):
        x_spec = shard.spec("activations", ("batch", "seq_resid", "embed"))
        row_spec, scalar, sharding = (
            shard.spec("activations", ("batch", "seq")),
            jax.P(),
            shard.within(TABLES).table("vocab", "embed"),
        )
        body = partial(
            _local, sharding=sharding, batch_by=shard.axes_for("batch"),
            seq_by=shard.axes_for("seq_resid"),
            embed_by=shard.axes_for("embed"), vocab_size=vocab_size, chunk=chunk, softcap=softcap,
            z_loss=z_loss, with_grads=with_grads,
        )  # fmt: skip
        in_specs, out_specs = (
            (x_spec, sharding.spec, row_spec, row_spec),
            ((scalar, scalar), (x_spec, sharding.spec)),
        )
        return shard.shard_map(body, in_specs, out_specs)(x, head, labels_BS, weights_BS)

    f.defvjp(f_fwd, f_bwd)
    objective, sums = f(x_BSD, head_VD)
    return {"objective": objective, **sums}


def label_scores(
    x_BSD: jax.Array,
    head_VD: jax.Array,
    labels_BS: jax.Array,
    shard: Shard,
    *,
    vocab_size: int,
    chunk: int = 1024,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Each label's log-probability, float32 [B, S], and whether it is the first of the most likely
    tokens, bool [B, S].

    Arguments as in `cross_entropy`; not differentiable.
    """
    sharding, row_spec = (
        shard.within(TABLES).table("vocab", "embed"),
        shard.spec("activations", ("batch", "seq")),
    )
    seq_by, embed_by = shard.axes_for("seq_resid"), shard.axes_for("embed")

    def local(x: jax.Array, head: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, head_VD, ids_V, vocab_by = _gathered(x, head, sharding, seq_by, embed_by)

        def step(row: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            z, top, hit = _vocabulary(row[0], row[1], head_VD, ids_V, vocab_by, vocab_size, softcap)
            lse = top + jnp.log(_over(vocab_by, lax.psum, jnp.exp(z - top[:, None]).sum(-1)))
            likeliest = _over(
                vocab_by,
                lax.pmin,
                jnp.where(z == top[:, None], ids_V, jnp.iinfo(jnp.int32).max).min(-1),
            )
            return _over(vocab_by, lax.psum, jnp.where(hit, z, 0).sum(-1)) - lse, likeliest == row[
                1
            ]

        scores = lax.map(step, _chunks((x, labels), chunk))
        return tuple(a.reshape(-1)[: labels.size].reshape(labels.shape) for a in scores)  # pyright: ignore[reportReturnType]

    in_specs = (shard.spec("activations", ("batch", "seq_resid", "embed")), sharding.spec, row_spec)
    return shard.shard_map(local, in_specs, (row_spec, row_spec))(x_BSD, head_VD, labels_BS)


def _gathered(
    x: jax.Array,
    head: jax.Array,
    sharding: TableSharding,
    seq_by: tuple[str, ...],
    embed_by: tuple[str, ...],
) -> tuple[Any, ...]:
    """Inside `Shard.shard_map`: (full sequences [B, S, D], this device's rows of the head [V, D],
    their ids, mesh axes of the ids).
    """
    vocab_by = axes_of(sharding.gathered_spec[0])
    x = gathered_residual(x, seq_by, embed_by)
    head_VD = sharding.gather(head.astype(x.dtype))
    ids_V = jnp.arange(len(head_VD)) + (lax.axis_index(vocab_by) * len(head_VD) if vocab_by else 0)
    return x, head_VD, ids_V, vocab_by


def _chunks(arrays: Sequence[jax.Array], chunk: int) -> list[jax.Array]:
    """[B, S, ...] as [n, C, ...], padded with zeros."""
    T = arrays[0].shape[0] * arrays[0].shape[1]
    n, C = -(-T // chunk), min(chunk, T)
    flat = [
        jnp.pad(a.reshape(T, *a.shape[2:]), [(0, n * C - T)] + [(0, 0)] * (a.ndim - 2))
        for a in arrays
    ]
    return [a.reshape(n, C, *a.shape[1:]) for a in flat]


def _vocabulary(
    x_CD: jax.Array,
    label_C: jax.Array,
    head_VD: jax.Array,
    ids_V: jax.Array,
    vocab_by: tuple[str, ...],
    vocab_size: int,
    softcap: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For a chunk: logits over this device's rows of the head [C, V], each token's maximum over all
    rows [C], and a mask of the labels.
    """
    raw = jnp.einsum("cd,vd->cv", x_CD, head_VD, preferred_element_type=jnp.float32)
    z = softcap * jnp.tanh(raw / softcap) if softcap else raw
    z = jnp.where(ids_V < vocab_size, z, -jnp.inf)
    return z, _over(vocab_by, lax.pmax, z.max(-1)), ids_V == label_C[:, None]


def _over(
    vocab_by: tuple[str, ...], reduce: Callable[..., jax.Array], value: jax.Array
) -> jax.Array:
    return reduce(value, vocab_by) if vocab_by else value


def _local(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    sharding: TableSharding,
    batch_by: tuple[str, ...],
    seq_by: tuple[str, ...],
    embed_by: tuple[str, ...],
    vocab_size: int,
    chunk: int,
    softcap: float,
    z_loss: float,
    with_grads: bool,
) -> tuple[tuple[jax.Array, Sums], Any]:
    """On one device's shards: ((objective, sums), (dx like x, dhead like head)), or None in place
    of both gradients.
    """
    dtype, out_shape = x.dtype, x.shape
    x, head_VD, ids_V, vocab_by = _gathered(x, head, sharding, seq_by, embed_by)
    V, D = head_VD.shape
    batch_shape, T = x.shape, labels.size
    rows = _chunks((x, labels, weights), chunk)
    n = len(rows[1])

    def step(carry, row):
        sums, dhead = carry
        x_CD, label_C, weight_C = row
        z, top, hit = _vocabulary(x_CD, label_C, head_VD, ids_V, vocab_by, vocab_size, softcap)
        exp = jnp.exp(z - top[:, None])
        total = _over(vocab_by, lax.psum, exp.sum(-1))
        lse = top + jnp.log(total)
        loss = lse - _over(vocab_by, lax.psum, jnp.where(hit, z, 0).sum(-1))
        sums = {
            "loss": sums["loss"] + (weight_C * loss).sum(),
            "weight": sums["weight"] + weight_C.sum(),
            "z_loss": sums["z_loss"] + (weight_C * lse**2).sum(),
        }
        if not with_grads:
            return (sums, dhead), None
        dz = (exp / total[:, None]) * (1 + 2 * z_loss * lse)[:, None] - hit
        if softcap:
            dz = dz * (1 - jnp.square(jnp.where(ids_V < vocab_size, z, 0) / softcap))
        dz = (dz * weight_C[:, None]).astype(dtype)
        dx_CD = jnp.einsum("cv,vd->cd", dz, head_VD)
        dhead = dhead + jnp.einsum("cv,cd->vd", dz, x_CD, preferred_element_type=jnp.float32)
        return (sums, dhead), dx_CD

    sums: Sums = {name: jnp.zeros((), jnp.float32) for name in ("loss", "weight", "z_loss")}
    dhead = jnp.zeros((V, D) if with_grads else (), jnp.float32)
    dx: Any
    (sums, dhead), dx = (
        lax.scan(step, (sums, dhead), rows) if n > 1 else step((sums, dhead), [a[0] for a in rows])
    )

    if batch_by:
        sums = lax.psum(sums, batch_by)
    objective = sums["loss"] + z_loss * sums["z_loss"]
    if not z_loss:
        del sums["z_loss"]
    if not with_grads:
        return (objective, sums), (None, None)
    dx = sum_into(dx.reshape(-1, D)[:T].reshape(batch_shape), vocab_by, seq_by, embed_by)
    return (objective, sums), (dx.reshape(out_shape), sharding.reduce_scatter(dhead))
