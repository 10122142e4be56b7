"""Memory of the chunked loss and of full fp32 logits: exact bytes of the compiled programs, at
sizes that no laptop could run.

Both are compiled from shapes alone for the CPU, in fp32, so that no casts disturb the comparison;
temp bytes are the compiler's allocation, without arguments and results. At a size that fits, their
times are compared, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from record import Record, Row, milliseconds, options

from mesh_lm.model.loss import cross_entropy
from sharding_rules import MeshConfig, Shard, make_mesh, preset

CHUNK = 1024
Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def chunked(chunk: int) -> Loss:
    """Returns (x [1, T, D], head [V, D], labels and weights [1, T]) -> summed cross-entropy, as the
    decoder calls it."""
    shard = Shard(preset("ddp"), make_mesh(MeshConfig(), jax.devices()[:1]))
    return lambda x, head, labels, weights: cross_entropy(
        x, head, labels, weights, shard, vocab_size=head.shape[0], chunk=chunk
    )["objective"]  # fmt: skip


def naive(x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the same from all logits at once."""
    logits = jnp.einsum("bsd,vd->bsv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return (weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels)).sum()


def shapes(T: int, V: int, D: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(s, t)
        for s, t in (
            ((1, T, D), "float32"),
            ((V, D), "float32"),
            ((1, T), "int32"),
            ((1, T), "float32"),
        )
    ]


def temp_bytes(loss: Loss, T: int, V: int, D: int) -> int:
    """Returns the temp bytes of the gradient program, without its arguments and results."""
    memory = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        .lower(*shapes(T, V, D))
        .compile()
        .memory_analysis()
    )
    assert memory is not None
    return memory.temp_size_in_bytes


def memory(V: int, tokens: list[int], widths: list[int]) -> list[Row]:
    rows = []
    for T in tokens:
        for D in widths:
            few, all_ = temp_bytes(chunked(CHUNK), T, V, D), temp_bytes(naive, T, V, D)
            rows.append({"tokens": T, "d_model": D, "vocab": V, "logits_fp32_gib": 4 * T * V / 2**30, "chunked_gib": few / 2**30,
                         "naive_gib": all_ / 2**30, "ratio": all_ / few, "chunked_bytes": few, "naive_bytes": all_})  # fmt: skip
    return rows


def speed(T: int, V: int, D: int, chunk: int, repeats: int) -> Row:
    """Returns the median times of both on random data, and the difference of their gradients."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, head = jax.random.normal(keys[0], (1, T, D)), 0.02 * jax.random.normal(keys[1], (V, D))
    arguments = x, head, jax.random.randint(keys[2], (1, T), 0, V), jnp.ones((1, T))
    both = [jax.jit(jax.value_and_grad(loss, argnums=(0, 1))) for loss in (chunked(chunk), naive)]
    (_, ours), (_, theirs) = (f(*arguments) for f in both)
    apart = max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(ours, theirs, strict=True))
    few, all_ = (
        milliseconds(lambda f=f: jax.block_until_ready(f(*arguments)), repeats) for f in both
    )
    return {"tokens": T, "d_model": D, "vocab": V, "chunk": chunk, "chunked_ms": few, "naive_ms": all_, "time_ratio": few / all_,
            "gradients_rel_difference": apart}  # fmt: skip


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    jax.config.update("jax_platforms", "cpu")
    record = Record(f"loss_memory{'-quick' * arguments.quick}", arguments.output)
    V, tokens, widths = (
        (2048, [2048, 4096], [64])
        if arguments.quick
        else (131_072, [8192, 32_768], [1024, 2048, 4096])
    )
    record.table(
        "Temp memory of loss and gradients",
        memory(V, tokens, widths),
        f"Chunks of {CHUNK:,} tokens, fp32, one device.",
    )
    sizes = (512, 1024, 64, 128, 3) if arguments.quick else (4096, 8192, 256, CHUNK, 5)
    record.table("Time", [speed(*sizes)], "One after the other in one process.")
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
