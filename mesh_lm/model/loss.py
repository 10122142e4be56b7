"""Cross-entropy over a sharded vocabulary, a chunk of tokens at a time.

The logits of a long batch are its largest tensor: 32 GiB in fp32 for 64k tokens at vocabulary 128k.
Here the logits of only `chunk` tokens exist at once. The gradient of a chunk is computed together
with its logits, so nothing is recomputed (three matmuls in all). The head's weight is gathered
once, and its gradient is reduced once, in fp32, after the last chunk, over those axes of the batch
that XLA handles (fsdp); the engine sums it over the others (data). Chunks are slices of the
tokens: with slices of the vocabulary, tensor parallelism would add an all-to-all and an all-reduce
to each iteration.

Sizes: B batch, S sequence, D embed, V vocabulary; T tokens of one device, C a chunk of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    """Returns weighted sums over the labels: "loss" (nats), "weight", "objective" = loss + z_loss,
    and "z_loss" (log Z squared) if it has a weight.

    Only "objective" is differentiable, with respect to x and head.

    Args:
      x_BSD: final activations in the compute type, sharded like the residual stream.
      head_VD: fp32, with logical axes ("vocab", "embed"). Rows from vocab_size on are padding and
        get probability 0.
      labels_BS: int32 in [0, vocab_size).
      weights_BS: float32.
    """
    x_spec = shard.spec("activations", ("batch", "seq_resid", "embed"))
    row_spec = shard.spec("activations", ("batch", "seq"))
    table = shard.within(TABLES).table("vocab", "embed")
    shards = _Shards(table, shard.axes_for("seq_resid"), shard.axes_for("embed"))

    # A custom VJP: the forward pass computes the gradients, too.
    @jax.custom_vjp
    def f(x: jax.Array, head: jax.Array) -> tuple[jax.Array, Sums]:
        return run(x, head, needs_grads=False)[0]

    def f_fwd(
        x: jax.Array, head: jax.Array
    ) -> tuple[tuple[jax.Array, Sums], tuple[jax.Array, jax.Array]]:
        return run(x, head, needs_grads=True)

    def f_bwd(
        grads: tuple[jax.Array, jax.Array], dout: tuple[jax.Array, Sums]
    ) -> tuple[jax.Array, jax.Array]:
        dx, dhead = grads
        return (dx * dout[0]).astype(dx.dtype), dhead * dout[0]

    def run(x: jax.Array, head: jax.Array, needs_grads: bool):
        on_device = partial(
            _on_device,
            shards=shards,
            batch_axes=shard.axes_for("batch"),
            vocab_size=vocab_size,
            chunk=chunk,
            softcap=softcap,
            z_loss=z_loss,
            needs_grads=needs_grads,
        )
        in_specs = (x_spec, table.spec, row_spec, row_spec)
        out_specs = ((jax.P(), jax.P()), (x_spec, table.spec))
        return shard.shard_map(on_device, in_specs, out_specs)(x, head, labels_BS, weights_BS)

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
    """Returns each label's log-probability, float32 [B, S], and whether it is the first of the most
    likely tokens, bool [B, S].

    Arguments as in `cross_entropy`; not differentiable.
    """
    table = shard.within(TABLES).table("vocab", "embed")
    shards = _Shards(table, shard.axes_for("seq_resid"), shard.axes_for("embed"))

    def on_device(
        x: jax.Array, head_VD: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, head = shards.gather(x, head_VD)

        def score(row: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_CD, label_C = row
            z, top, is_label = _logits(x_CD, label_C, head, vocab_size, softcap)
            exp = jnp.exp(z - top[:, None])
            # Each device has some rows of the vocabulary: vectors [C] are reduced, never logits.
            lse = top + jnp.log(_over_vocabulary(head, lax.psum, exp.sum(-1)))
            no_id = jnp.iinfo(jnp.int32).max
            first_id = jnp.where(z == top[:, None], head.ids_V, no_id).min(-1)
            likeliest = _over_vocabulary(head, lax.pmin, first_id)
            label_z = _over_vocabulary(head, lax.psum, jnp.where(is_label, z, 0).sum(-1))
            return label_z - lse, likeliest == label_C

        scores = lax.map(score, _chunks((x, labels), chunk))
        return tuple(  # pyright: ignore[reportReturnType]
            a.reshape(-1)[: labels.size].reshape(labels.shape) for a in scores
        )

    row_spec = shard.spec("activations", ("batch", "seq"))
    x_spec = shard.spec("activations", ("batch", "seq_resid", "embed"))
    in_specs = (x_spec, table.spec, row_spec)
    return shard.shard_map(on_device, in_specs, (row_spec, row_spec))(x_BSD, head_VD, labels_BS)


# On one device, inside `Shard.shard_map`.


class _Head(NamedTuple):
    """This device's rows of the head."""

    head_VD: jax.Array
    ids_V: jax.Array
    axes: tuple[str, ...]
    """The mesh axes that the rows are sharded over."""


@dataclasses.dataclass(frozen=True)
class _Shards:
    """How the head and the residual stream are sharded."""

    table: TableSharding
    seq_axes: tuple[str, ...]
    embed_axes: tuple[str, ...]

    def gather(self, x: jax.Array, head: jax.Array) -> tuple[jax.Array, _Head]:
        """Returns (full sequences [B, S, D], this device's rows of the head)."""
        axes = axes_of(self.table.gathered_spec[0])
        x = gathered_residual(x, self.seq_axes, self.embed_axes)
        head_VD = self.table.gather(head.astype(x.dtype))
        local_ids = jnp.arange(len(head_VD))
        first_id = lax.axis_index(axes) * len(head_VD) if axes else 0
        return x, _Head(head_VD, local_ids + first_id, axes)


def _chunks(arrays: Sequence[jax.Array], chunk: int) -> list[jax.Array]:
    """Returns arrays [B, S, ...] as [n, C, ...], padded with zeros."""
    T = arrays[0].shape[0] * arrays[0].shape[1]
    n = -(-T // chunk)
    C = min(chunk, T)
    flat = [
        jnp.pad(a.reshape(T, *a.shape[2:]), [(0, n * C - T)] + [(0, 0)] * (a.ndim - 2))
        for a in arrays
    ]
    return [a.reshape(n, C, *a.shape[1:]) for a in flat]


def _logits(
    x_CD: jax.Array, label_C: jax.Array, head: _Head, vocab_size: int, softcap: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, for a chunk, logits over this device's rows of the head [C, V], each token's maximum
    over all rows [C], and a mask of the labels [C, V].
    """
    z = jnp.einsum("cd,vd->cv", x_CD, head.head_VD, preferred_element_type=jnp.float32)
    if softcap:
        z = softcap * jnp.tanh(z / softcap)
    z = jnp.where(head.ids_V < vocab_size, z, -jnp.inf)
    return z, _over_vocabulary(head, lax.pmax, z.max(-1)), head.ids_V == label_C[:, None]


def _over_vocabulary(head: _Head, reduce: Callable[..., jax.Array], value: jax.Array) -> jax.Array:
    """Returns a sum or maximum over this device's rows, [C], reduced over those of all devices.

    With tensor parallelism, the loss of a chunk sends three such vectors, and no logits.
    """
    return reduce(value, head.axes) if head.axes else value


def _on_device(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    shards: _Shards,
    batch_axes: tuple[str, ...],
    vocab_size: int,
    chunk: int,
    softcap: float,
    z_loss: float,
    needs_grads: bool,
) -> tuple[tuple[jax.Array, Sums], Any]:
    """Returns ((objective, sums), (dx like x, dhead like head)), or None in place of both
    gradients.
    """
    dtype = x.dtype
    local_shape = x.shape
    x, head_rows = shards.gather(x, head)
    V, D = head_rows.head_VD.shape
    gathered_shape = x.shape
    T = labels.size
    rows = _chunks((x, labels, weights), chunk)
    n_chunks = len(rows[1])

    def step(
        carry: tuple[Sums, jax.Array], row: list[jax.Array]
    ) -> tuple[tuple[Sums, jax.Array], jax.Array | None]:
        sums, dhead = carry
        x_CD, label_C, weight_C = row
        z, top, is_label = _logits(x_CD, label_C, head_rows, vocab_size, softcap)
        exp = jnp.exp(z - top[:, None])
        # Each device has some rows of the vocabulary: vectors [C] are reduced, never logits.
        total = _over_vocabulary(head_rows, lax.psum, exp.sum(-1))
        lse = top + jnp.log(total)
        label_z = _over_vocabulary(head_rows, lax.psum, jnp.where(is_label, z, 0).sum(-1))
        loss = lse - label_z
        sums = {
            "loss": sums["loss"] + (weight_C * loss).sum(),
            "weight": sums["weight"] + weight_C.sum(),
            "z_loss": sums["z_loss"] + (weight_C * lse**2).sum(),
        }
        if not needs_grads:
            return (sums, dhead), None
        # The gradient of loss + z_loss lse^2 by the logits: p (1 + 2 z_loss lse) - onehot(label).
        dz = (exp / total[:, None]) * (1 + 2 * z_loss * lse)[:, None] - is_label
        if softcap:
            # tanh' = 1 - tanh^2, of the capped logits; those of padding are -inf.
            finite_z = jnp.where(head_rows.ids_V < vocab_size, z, 0)
            dz = dz * (1 - jnp.square(finite_z / softcap))
        dz = (dz * weight_C[:, None]).astype(dtype)
        dx_CD = jnp.einsum("cv,vd->cd", dz, head_rows.head_VD)
        dhead = dhead + jnp.einsum("cv,cd->vd", dz, x_CD, preferred_element_type=jnp.float32)
        return (sums, dhead), dx_CD

    sums: Sums = {name: jnp.zeros((), jnp.float32) for name in ("loss", "weight", "z_loss")}
    dhead = jnp.zeros((V, D) if needs_grads else (), jnp.float32)
    dx: Any
    if n_chunks > 1:
        (sums, dhead), dx = lax.scan(step, (sums, dhead), rows)
    else:
        (sums, dhead), dx = step((sums, dhead), [a[0] for a in rows])

    if batch_axes:
        # Three scalars.
        sums = lax.psum(sums, batch_axes)
    objective = sums["loss"] + z_loss * sums["z_loss"]
    if not z_loss:
        del sums["z_loss"]
    if not needs_grads:
        return (objective, sums), (None, None)
    # Each device has the gradients of its own rows of the vocabulary: they are summed, and sharded
    # like x and the head.
    dx = dx.reshape(-1, D)[:T].reshape(gathered_shape)
    dx = sum_into(dx, head_rows.axes, shards.seq_axes, shards.embed_axes)
    return (objective, sums), (dx.reshape(local_shape), shards.table.reduce_scatter(dhead))
