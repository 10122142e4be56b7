"""Vocabulary-parallel table lookup (Megatron-LM, arXiv 1909.08053): each device looks up the ids it
holds, and the results are summed.

XLA would rematerialise a sharded table in full, and inside a manual region the lookup would abort
the process. Sizes: B batch, S sequence, V rows of the table, D embed; lower-case v, d: this
device's shard.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sharding_rules import TABLES, Shard, axes_of
from sharding_rules.shard import local_block


def lookup(
    table_VD: jax.Array, ids_BS: jax.Array, shard: Shard, axes: tuple[str, str], dtype: str
) -> jax.Array:
    """Rows of the table for ids int32 [B, S] in [0, V), as `dtype` [B, S, D], sharded like the
    residual stream.

    axes: the table's logical axes, such as ("vocab", "embed"). The gradient is summed over the
    batch in fp32.
    """
    sharding, seq_by, embed_by = (
        shard.within(TABLES).table(*axes),
        shard.axes_for("seq_resid"),
        shard.axes_for("embed"),
    )
    rows_by = axes_of(sharding.gathered_spec[0])
    rows = table_VD.shape[0] // shard.n_shards(rows_by)
    ids_spec, out_spec = (
        shard.spec("activations", ("batch", "seq")),
        shard.spec("activations", ("batch", "seq_resid", "embed")),
    )

    def local_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = ids - (lax.axis_index(rows_by) * rows if rows_by else 0)
        return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)

    def forward(table_vd: jax.Array, ids: jax.Array) -> jax.Array:
        table = sharding.gather(table_vd.astype(dtype))
        local, held = local_ids(ids)
        out = jnp.where(held[..., None], table[local], 0) if rows_by else table[local]
        return sum_into(out, rows_by, seq_by, embed_by)

    def backward(ids: jax.Array, dout: jax.Array) -> jax.Array:
        dout = gathered_residual(dout, seq_by, embed_by)
        local, held = local_ids(ids)
        dout = jnp.where(held[..., None], dout, 0).astype(jnp.float32)
        return sharding.reduce_scatter(
            jnp.zeros((rows, dout.shape[-1]), jnp.float32).at[local].add(dout)
        )

    @jax.custom_vjp
    def f(table: jax.Array, ids: jax.Array) -> jax.Array:
        return shard.shard_map(forward, (sharding.spec, ids_spec), out_spec)(table, ids)

    def f_bwd(ids: jax.Array, dout: jax.Array) -> tuple[jax.Array, None]:
        return shard.shard_map(backward, (ids_spec, out_spec), sharding.spec)(ids, dout).astype(
            table_VD.dtype
        ), None

    f.defvjp(lambda table, ids: (f(table, ids), ids), f_bwd)
    return f(table_VD, ids_BS)


def add_positions(
    x_BSD: jax.Array, table_VD: jax.Array, ids_1S: jax.Array, shard: Shard, axes: tuple[str, str]
) -> jax.Array:
    """x plus the table's rows for ids int32 [1, S], which are unique and the same for all
    sequences. Each device gathers its own rows only.

    x: [B, S, D], sharded like the residual stream. axes: as for `lookup`. The gradient is summed
    over the batch in fp32. With plain XLA, every device would gather the whole table in fp32, and
    all-reduce its gradient.
    """
    sharding, seq_by, embed_by = (
        shard.within(TABLES).table(*axes),
        shard.axes_for("seq_resid"),
        shard.axes_for("embed"),
    )
    x_spec, ids_spec = (
        shard.spec("activations", names)
        for names in (("batch", "seq_resid", "embed"), (None, "seq"))
    )
    rows = table_VD.shape[0]
    if sharding.spec[0]:  # the rows themselves are sharded
        return x_BSD + lookup(
            table_VD, jnp.broadcast_to(ids_1S, x_BSD.shape[:2]), shard, axes, str(x_BSD.dtype)
        )

    # If one mesh axis shards both sequence and embedding, columns must be gathered before the
    # sequence is divided; and if the stream's columns are sharded, each device takes its own of
    # gathered ones.
    gather_first = bool(embed_by) or any(axis in seq_by for axis in sharding.gather_axes[1])

    def forward(x: jax.Array, table_Vd: jax.Array, ids: jax.Array) -> jax.Array:
        table_Sd = table_Vd[ids[0]].astype(x.dtype)
        table_SD = sharding.gather(table_Sd) if gather_first else table_Sd
        local_Sd = sum_into(table_SD[None], (), seq_by, embed_by)[0]
        return x + (local_Sd if gather_first else sharding.gather(local_Sd))

    def backward(dout: jax.Array, ids: jax.Array) -> jax.Array:
        local_SD = gathered_residual(dout.astype(jnp.float32).sum(0)[None], (), embed_by)[0]
        part = local_SD if gather_first else sharding.reduce_scatter(local_SD)
        full = lax.all_gather(part, seq_by, axis=0, tiled=True) if seq_by else part
        full_Sd = sharding.reduce_scatter(full) if gather_first else full
        return (
            jnp.zeros((rows, full_Sd.shape[1]), jnp.float32)
            .at[ids[0]]
            .add(full_Sd, unique_indices=True)
        )

    @jax.custom_vjp
    def f(x: jax.Array, table: jax.Array, ids: jax.Array) -> jax.Array:
        return shard.shard_map(forward, (x_spec, sharding.spec, ids_spec), x_spec)(x, table, ids)

    def f_bwd(ids: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        return dout, shard.shard_map(backward, (x_spec, ids_spec), sharding.spec)(dout, ids), None

    f.defvjp(lambda x, table, ids: (f(x, table, ids), ids), f_bwd)
    return f(x_BSD, table_VD, ids_1S)


def sum_into(
    x_BSD: jax.Array, over: tuple[str, ...], seq_by: tuple[str, ...], embed_by: tuple[str, ...]
) -> jax.Array:
    """Inside `Shard.shard_map`: partial results summed over mesh axes `over`, and sharded along S
    and D like the residual stream.
    """
    for axis, dim in [*((axis, 2) for axis in embed_by), *((axis, 1) for axis in seq_by)]:
        x_BSD = (
            lax.psum_scatter(x_BSD, axis, scatter_dimension=dim, tiled=True)
            if axis in over
            else local_block(x_BSD, (axis,), dim)
        )
    rest = tuple(axis for axis in over if axis not in (*seq_by, *embed_by))
    return lax.psum(x_BSD, rest) if rest else x_BSD


def gathered_residual(
    x_BSD: jax.Array, seq_by: tuple[str, ...], embed_by: tuple[str, ...]
) -> jax.Array:
    """Inside `Shard.shard_map`: the residual stream with full rows, of all tokens of this device's
    sequences.
    """
    for axes, dim in ((embed_by, 2), (seq_by, 1)):
        x_BSD = lax.all_gather(x_BSD, axes, axis=dim, tiled=True) if axes else x_BSD
    return x_BSD
