"""Vocabulary-parallel table lookup (Megatron-LM, arXiv 1909.08053): each device looks up the ids
whose rows it has, and the results are summed.

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
    """Returns rows of the table for ids int32 [B, S] in [0, V), as `dtype` [B, S, D], sharded like
    the residual stream.

    axes: the table's logical axes, such as ("vocab", "embed"). The gradient is summed in fp32 over
    those axes of the batch that XLA handles (fsdp); over manual ones (data) the engine sums it.
    """
    table_sharding = shard.within(TABLES).table(*axes)
    seq_axes = shard.axes_for("seq_resid")
    embed_axes = shard.axes_for("embed")
    row_axes = axes_of(table_sharding.gathered_spec[0])
    n_rows = table_VD.shape[0] // shard.n_shards(row_axes)
    ids_spec = shard.spec("activations", ("batch", "seq"))
    out_spec = shard.spec("activations", ("batch", "seq_resid", "embed"))

    def local_rows(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the row of each id on this device, whether it has the row)."""
        first_row = lax.axis_index(row_axes) * n_rows if row_axes else 0
        rows = ids - first_row
        return jnp.clip(rows, 0, n_rows - 1), (rows >= 0) & (rows < n_rows)

    def forward(table_vd: jax.Array, ids: jax.Array) -> jax.Array:
        table = table_sharding.gather(table_vd.astype(dtype))
        rows, is_local = local_rows(ids)
        if row_axes:
            out = jnp.where(is_local[..., None], table[rows], 0)
        else:
            out = table[rows]
        return sum_into(out, row_axes, seq_axes, embed_axes)

    def backward(ids: jax.Array, dout: jax.Array) -> jax.Array:
        dout = gathered_residual(dout, seq_axes, embed_axes)
        rows, is_local = local_rows(ids)
        dout = jnp.where(is_local[..., None], dout, 0).astype(jnp.float32)
        dtable = jnp.zeros((n_rows, dout.shape[-1]), jnp.float32).at[rows].add(dout)
        return table_sharding.reduce_scatter(dtable)

    # A custom VJP, for the gradient's type and collectives (see above).
    @jax.custom_vjp
    def f(table: jax.Array, ids: jax.Array) -> jax.Array:
        return shard.shard_map(forward, (table_sharding.spec, ids_spec), out_spec)(table, ids)

    def f_bwd(ids: jax.Array, dout: jax.Array) -> tuple[jax.Array, None]:
        run = shard.shard_map(backward, (ids_spec, out_spec), table_sharding.spec)
        return run(ids, dout).astype(table_VD.dtype), None

    f.defvjp(lambda table, ids: (f(table, ids), ids), f_bwd)
    return f(table_VD, ids_BS)


def add_positions(
    x_BSD: jax.Array, table_VD: jax.Array, ids_1S: jax.Array, shard: Shard, axes: tuple[str, str]
) -> jax.Array:
    """Returns x plus the table's rows for ids int32 [1, S], which are unique and the same for all
    sequences. Each device gathers its own rows only.

    x: [B, S, D], sharded like the residual stream. axes: as for `lookup`. The gradient is summed
    over the batch in fp32. With plain XLA, every device would gather the whole table in fp32, and
    all-reduce its gradient.
    """
    table_sharding = shard.within(TABLES).table(*axes)
    if table_sharding.spec[0]:  # the rows themselves are sharded
        ids_BS = jnp.broadcast_to(ids_1S, x_BSD.shape[:2])
        return x_BSD + lookup(table_VD, ids_BS, shard, axes, str(x_BSD.dtype))
    seq_axes = shard.axes_for("seq_resid")
    embed_axes = shard.axes_for("embed")
    x_spec = shard.spec("activations", ("batch", "seq_resid", "embed"))
    ids_spec = shard.spec("activations", (None, "seq"))
    n_rows = table_VD.shape[0]

    # If one mesh axis shards both sequence and embedding, columns must be gathered before the
    # sequence is divided; and if the stream's columns are sharded, each device takes its own of
    # gathered ones.
    gather_first = bool(embed_axes) or any(a in seq_axes for a in table_sharding.gather_axes[1])

    def forward(x: jax.Array, table_Vd: jax.Array, ids: jax.Array) -> jax.Array:
        rows = table_Vd[ids[0]].astype(x.dtype)
        if gather_first:
            rows = table_sharding.gather(rows)
        rows = sum_into(rows[None], (), seq_axes, embed_axes)[0]
        if not gather_first:
            rows = table_sharding.gather(rows)
        return x + rows

    def backward(dout: jax.Array, ids: jax.Array) -> jax.Array:
        rows = gathered_residual(dout.astype(jnp.float32).sum(0)[None], (), embed_axes)[0]
        if not gather_first:
            rows = table_sharding.reduce_scatter(rows)
        if seq_axes:
            # The transpose of dividing the sequence.
            rows = lax.all_gather(rows, seq_axes, axis=0, tiled=True)
        if gather_first:
            rows = table_sharding.reduce_scatter(rows)
        dtable = jnp.zeros((n_rows, rows.shape[1]), jnp.float32)
        return dtable.at[ids[0]].add(rows, unique_indices=True)

    # A custom VJP, for the gradient's type and collectives (see above).
    @jax.custom_vjp
    def f(x: jax.Array, table: jax.Array, ids: jax.Array) -> jax.Array:
        run = shard.shard_map(forward, (x_spec, table_sharding.spec, ids_spec), x_spec)
        return run(x, table, ids)

    def f_bwd(ids: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        run = shard.shard_map(backward, (x_spec, ids_spec), table_sharding.spec)
        return dout, run(dout, ids), None

    f.defvjp(lambda x, table, ids: (f(x, table, ids), ids), f_bwd)
    return f(x_BSD, table_VD, ids_1S)


def sum_into(
    x_BSD: jax.Array,
    summed_axes: tuple[str, ...],
    seq_axes: tuple[str, ...],
    embed_axes: tuple[str, ...],
) -> jax.Array:
    """Returns, inside `Shard.shard_map`, partial results summed over mesh axes `summed_axes`, and
    sharded along S and D like the residual stream.
    """
    # Where an axis both sums and shards, a reduce-scatter does both.
    shards = [(axis, 2) for axis in embed_axes] + [(axis, 1) for axis in seq_axes]
    for axis, dim in shards:
        if axis in summed_axes:
            x_BSD = lax.psum_scatter(x_BSD, axis, scatter_dimension=dim, tiled=True)
        else:
            x_BSD = local_block(x_BSD, (axis,), dim)
    # The other axes of the sum.
    all_reduced = tuple(axis for axis in summed_axes if axis not in (*seq_axes, *embed_axes))
    return lax.psum(x_BSD, all_reduced) if all_reduced else x_BSD


def gathered_residual(
    x_BSD: jax.Array, seq_axes: tuple[str, ...], embed_axes: tuple[str, ...]
) -> jax.Array:
    """Returns, inside `Shard.shard_map`, the residual stream with full rows, of all tokens of this
    device's sequences.
    """
    # Tables and the head work on complete rows.
    if embed_axes:
        x_BSD = lax.all_gather(x_BSD, embed_axes, axis=2, tiled=True)
    if seq_axes:
        x_BSD = lax.all_gather(x_BSD, seq_axes, axis=1, tiled=True)
    return x_BSD
