"""Bytes that norms, rotary positions, activations and the loss move in device memory, and the
minimum: does any need its own kernel?

Nothing runs on a GPU. Forward and backward are compiled separately for one H100, as in a training
step. Each kernel is assumed to read its operands and write its results once; the minimum reads each
input of the function once and writes each result once. The time of the excess at the H100's
bandwidth is compared with the predicted time of the layer. Without a GPU to tune on, matmuls become
Triton kernels, with other operations fused into them. Needs the compiler for CUDA: pip install -e
'.[aot]'.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from record import Record, Row, options

from mesh_lm.config import files
from mesh_lm.model import DecoderConfig, attention, layers, mlp
from mesh_lm.model.loss import cross_entropy
from pallas_kernels import grouped_matmul
from sharding_rules import Shard, preset
from sharding_rules.lab import TARGETS, h100, hlo
from sharding_rules.lab.prices import FREE, Prices
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import OPTIMISTIC

TOKENS = 8192
WORTH = 0.02
"""Share of the step from which on a kernel is worth its maintenance."""
HBM, PEAK = TARGETS["h100"].hbm_bandwidth, TARGETS["h100"].flops["bf16"]


Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and the shapes of its arguments."""


@dataclasses.dataclass(frozen=True)
class Spot:
    """A part of a layer: its forward and its backward."""

    forward: Program
    backward: Program
    times: int = 1
    """Occurrences in a layer."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Memory traffic of one program, in bytes. Matmuls are separate, because their transfers
    overlap with their computation."""

    least: int
    """Arguments and results, each once, without arguments that no result depends on."""
    kernels: tuple[tuple[str, int], ...]
    """(name, bytes) of kernels that are not matmuls, over all iterations of their loops."""
    matmuls: tuple[tuple[int, int], ...]
    """(FLOPs, bytes) of the matmuls."""

    @property
    def moved(self) -> int:
        return sum(size for _, size in self.kernels)

    @property
    def matmul_us(self) -> float:
        return sum(multiplying_us(flops) for flops, _ in self.matmuls)

    @property
    def waits_us(self) -> float:
        """The seconds by which the matmuls' transfers exceed their computation."""
        return sum(
            max(0.0, moving_us(size) - multiplying_us(flops)) for flops, size in self.matmuls
        )


class _Bytes(Prices):
    """The timeline's model of memory traffic, in bytes."""

    def _moving(self, n_bytes: int, dtype: str) -> float:
        return n_bytes


def moving_us(size: float) -> float:
    return 1e6 * size / (OPTIMISTIC.memory["bf16"].value * HBM)


def multiplying_us(flops: float) -> float:
    return 1e6 * flops / (OPTIMISTIC.matmul.value * PEAK)


def traffic(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Traffic:
    """Compiles for one H100 and returns the program's traffic. Raises LabError if the compiler is
    not installed."""
    sharding = jax.NamedSharding(h100(), jax.P())
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), inputs
    )
    compiled = jax.jit(function).lower(*placed).compile()
    module = hlo.parse(compiled.as_text() or "")
    prices = _Bytes(module, Provenance(module), TARGETS["h100"], OPTIMISTIC)
    kernels, matmuls = [], []
    for visit in module.visits():
        for one in () if visit.fused else module.computations[visit.computation]:
            if one.opcode in FREE or one.opcode in ("while", "conditional", "call"):
                continue
            times, size = round(math.prod(visit.loops)), int(prices._memory(one))
            if flops := module.flops(one):
                matmuls += [(flops, size)] * times
            else:
                kernels.append((one.name, times * size))
    memory = compiled.memory_analysis()
    assert memory is not None
    return Traffic(
        memory.argument_size_in_bytes + memory.output_size_in_bytes, tuple(kernels), tuple(matmuls)
    )


def of(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def gradient(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> Program:
    """Returns (inputs, gradients of the results) -> gradients of the inputs."""
    return lambda inputs, grads: jax.vjp(function, *inputs)[1](grads), (
        inputs,
        jax.eval_shape(function, *inputs),
    )


def spots(config: DecoderConfig, T: int) -> dict[str, Spot]:
    """Returns the parts of a layer other than matmuls and attention, for T tokens; the backward
    starts from what remat=save_names keeps."""
    B, S, D, F = max(1, T // config.seq_len), min(T, config.seq_len), config.d_model, config.d_mlp
    x, vectors = (
        of(B, S, D),
        [of(D, dtype="float32")] * (2 if config.norm == "layernorm" and config.biases else 1),
    )

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return layers._normalise(x, scale, bias, config)

    def kept_norm(h: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
        return h, norm(h, *vectors)

    named_spots = {
        "norm": Spot((norm, (x, *vectors)), gradient(norm, x, *vectors), 2),
        "residual and norm": Spot(
            (lambda x, y, *vectors: kept_norm(x + y, *vectors), (x, x, *vectors)),
            gradient(kept_norm, x, *vectors),
            2,
        ),
    }
    if config.norm == "layernorm" and config.biases:
        name = "residual and norm, other gradient"
        named_spots[name] = dataclasses.replace(
            named_spots["residual and norm"],
            backward=(one_pass(config.norm_eps), (x, vectors[0], (x, x))),
        )
    if config.positions == "rotary":
        heads = tuple(of(B, S, n, config.d_head) for n in (config.n_heads, config.kv_heads))

        def rotary(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            angles = attention.rope_table(config, jnp.arange(S))
            return attention.rotate(q, angles), attention.rotate(k, angles)

        named_spots["rotary, q and k"] = Spot((rotary, heads), gradient(rotary, *heads))
    if config.activation == "swiglu":
        named_spots["SwiGLU"] = Spot(
            (mlp.swiglu, (up := of(B, S, 2, F),)), gradient(mlp.swiglu, up)
        )
    else:

        def bias_gelu(raw: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
            up = layers.add_bias(raw, bias)
            return up, mlp.gelu(up)

        def back(up: jax.Array, dh: jax.Array) -> Any:
            (dup,) = jax.vjp(mlp.gelu, up)[1](dh)
            return jax.vjp(layers.add_bias, up, jnp.zeros(F))[1](dup)

        named_spots["bias and GELU"] = Spot(
            (bias_gelu, (up := of(B, S, F), of(F, dtype="float32"))), (back, (up, up))
        )
    return named_spots


def one_pass(eps: float) -> Callable[..., Any]:
    """LayerNorm's gradient, written so that one pass over x and dy gives all sums over a row. The
    model does not do this.

    (h, scale, (dh, dn)) -> gradients of h, scale and bias; h is also passed on unchanged, next to
    its norm n. The row's first value is subtracted from h before the sums, because a variance as a
    difference of two sums loses digits if the mean is large.
    """

    def back(
        h: jax.Array, scale: jax.Array, grads: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        wide, (dh, dn) = h.astype(jnp.float32), (g.astype(jnp.float32) for g in grads)
        x, g = wide - h[..., :1].astype(jnp.float32), dn * scale
        mean, mean_g = x.mean(-1, keepdims=True), g.mean(-1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean) + eps)
        along = inverse * ((g * x).mean(-1, keepdims=True) - mean * mean_g)
        normal = (x - mean) * inverse
        dx = inverse * (g - mean_g - normal * along)
        return (dh + dx).astype(h.dtype), (dn * normal).sum((0, 1)), dn.sum((0, 1))

    return back


def loss(config: DecoderConfig, T: int) -> Program:
    """(final activations, head, labels, weights) -> the loss and its gradients."""
    shard = Shard(preset("ddp"), h100())

    def objective(
        x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array
    ) -> jax.Array:
        return cross_entropy(
            x, head, labels, weights, shard, vocab_size=config.vocab_size, chunk=config.loss_chunk
        )["objective"]

    rows = of(1, T, dtype="int32"), of(1, T, dtype="float32")
    return jax.value_and_grad(objective, (0, 1)), (
        of(1, T, config.d_model),
        of(config.padded_vocab, config.d_model, dtype="float32"),
        *rows,
    )


def layer_us(config: DecoderConfig, T: int, moved: int) -> float:
    """Predicts one layer's forward and backward: its matmuls, causal attention at the speed of
    published kernels, and these bytes."""
    D, F, heads = config.d_model, config.d_mlp, config.n_heads * config.d_head
    weights = (
        2 * D * heads
        + 2 * D * config.kv_heads * config.d_head
        + D * F * (3 if config.activation == "swiglu" else 2)
    )
    pairs = 2 * T * min(T, config.seq_len) * heads
    shares = [
        OPTIMISTIC.attention_share(128, 0, backward=backward, deterministic=False)
        for backward in (False, True)
    ]
    attention = 1e6 * pairs / PEAK * (1 / shares[0] + 2.5 / shares[1])
    return multiplying_us(6 * weights * T) + attention + moving_us(moved)


def in_layers(name: str, config: DecoderConfig, T: int) -> tuple[list[Row], list[Row], float]:
    """Returns rows of bytes, rows of shares, and the predicted time of a layer."""
    measured = {
        part: (traffic(*spot.forward), traffic(*spot.backward), spot.times)
        for part, spot in spots(config, T).items()
    }
    counted = [both for part, both in measured.items() if part != "norm" and "other" not in part]
    layer = layer_us(config, T, sum(times * (f.moved + b.moved) for f, b, times in counted))
    detail, shares = [], []
    for part, (*both, times) in measured.items():
        for direction, one in zip(("forward", "backward"), both, strict=True):
            detail.append({"model": name, "part": part, "pass": direction, "least_mib": one.least / 2**20, "moved_mib": one.moved / 2**20,
                           "ratio": one.moved / one.least, "kernels": sum(size > 2**20 for _, size in one.kernels)})  # fmt: skip
        moved, least = (sum(getattr(one, field) for one in both) for field in ("moved", "least"))
        excess = times * moving_us(moved - least)
        shares.append({"model": name, "part": part, "times": times, "ratio": moved / least, "excess_us": excess, "layer_us": layer,
                       "share_percent": 100 * excess / layer, "kernel": excess > WORTH * layer})  # fmt: skip
    return detail, shares, layer


def of_loss(name: str, config: DecoderConfig, T: int, layer: float) -> Row:
    """The minimum: each logit read once in fp32, its gradient written once in bf16, the head cast
    once."""
    loss_traffic = traffic(*loss(config, T))
    least = 6 * config.padded_vocab * (T + config.d_model)
    excess = moving_us(loss_traffic.moved - least)
    step = (
        config.n_layers * layer
        + loss_traffic.matmul_us
        + loss_traffic.waits_us
        + moving_us(loss_traffic.moved)
    )
    return {"model": name, "least_mib": least / 2**20, "moved_mib": loss_traffic.moved / 2**20,
            "ratio": loss_traffic.moved / least,
            "excess_ms": excess / 1e3, "matmuls_ms": loss_traffic.matmul_us / 1e3,
            "matmuls_wait_ms": loss_traffic.waits_us / 1e3, "step_ms": step / 1e3,
            "share_percent": 100 * excess / step, "wait_percent": 100 * loss_traffic.waits_us / step,
            "kernel": excess > WORTH * step}  # fmt: skip


def of_grouped_matmul(T: int, D: int, F: int, groups: list[int]) -> list[Row]:
    """Returns the temp memory of y and both gradients, without arguments and results."""

    def by(name: Any) -> Callable[..., Any]:
        if name == "jax.lax.ragged_dot":
            return jax.lax.ragged_dot
        return partial(grouped_matmul, implementation=name, platform="gpu", capability=(9, 0))

    def both(name: str, x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> Any:
        y, back = jax.vjp(lambda x, w: by(name)(x, w, sizes), x, w)
        return y, back(dy)

    rows, sharding = [], jax.sharding.SingleDeviceSharding(h100().devices.flat[0])
    for E in groups:
        inputs = of(T, D), of(E, D, F), of(E, dtype="int32"), of(T, F)
        placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in inputs]
        row: Row = {"tokens": T, "d_in": D, "d_out": F, "groups": E}
        for name in ("mosaic", "xla", "jax.lax.ragged_dot"):
            memory = jax.jit(partial(both, name)).lower(*placed).compile().memory_analysis()
            assert memory is not None
            row[f"{name}_mib"] = memory.temp_size_in_bytes / 2**20
        rows.append(row)
    return rows


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"hot_spots{'-quick' * arguments.quick}",
        arguments.output,
        kind=f"h100 jax {jax.__version__}",
    )
    details, shares, losses = [], [], []
    for name in ("gpt_1_3b", "llama3_8b")[: 1 if arguments.quick else None]:
        config = files.load(f"configs/{name}.py").model
        assert isinstance(config, DecoderConfig)
        detail, share, layer = in_layers(name, config, TOKENS)
        details, shares, losses = (
            details + detail,
            shares + share,
            [*losses, of_loss(name, config, TOKENS, layer)],
        )
    heading = f"{TOKENS:,} tokens on one H100, "
    record.table(
        "Bytes of a call", details, heading + "bf16. Kernels: those that move more than a MiB."
    )
    note = (
        f"forward and backward. Times are predicted, never measured. Kernel: more than {WORTH:.0%} "
        "of the layer is excess."
    )
    record.table("Share of a layer", shares, heading + note)
    record.table(
        "Loss",
        losses,
        heading
        + (
            "in chunks; matmuls apart. Their wait: bytes beyond what their FLOPs take. Step: all "
            "layers and this."
        ),
    )
    groups = of_grouped_matmul(TOKENS, 2048, 1024, [8] if arguments.quick else [8, 64])
    record.table(
        "Temp memory of grouped matmul",
        groups,
        heading + "bf16: result and both gradients, beside arguments and results.",
    )
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
