"""The closed forms of two-dimensional tensor parallelism, and the bytes of tensor parallelism in one, two and more dimensions, on paper.

x, y: devices along `tensor` and `tensor_y`. A matrix is sharded along both of its dimensions, the residual stream along embed over y. So
queries, keys, values and up are partial sums over y, out and down over x. Pure arithmetic, as in closed_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.sharding_rules.closed_forms_context import AG, AR, RS
from tests.sharding_rules.subjects import Decoder, Strategy

SYMBOLS = {
    "X/Y": ("X / devices along tensor_y", "bf16", "a device's columns of the residual stream"),
    "U": ("2 b s x columns of up (and gate) / T", "bf16", "what up returns, with full rows"),
    "D": ("2 b s x rows of down / T", "bf16", "the gradient of what down reads"),
    "u/Y": ("u / devices along tensor_y", "f32", "their gradients, summed over the batch before they are gathered"),
    "n/Y": ("n / devices along tensor_y", "f32", "the same of the last norm"),
    "t": ("4 b s", "f32", "one number per token: a sum of a norm"),
    "w": ("4 x biases of q, k and v / T", "f32", "their gradients, whose heads attention has scattered over tensor_y"),
}


def sizes(model: Decoder, strategy: Strategy, b: int) -> dict[str, float]:
    """Symbol -> bytes."""
    tokens = b * model.seq / (strategy.sequence * strategy.ulysses)
    return {
        "X/Y": 2.0 * tokens * model.d_model / strategy.tensor_y,
        "U": 2.0 * tokens * model.d_ff * (1 + model.gated) / strategy.tensor,
        "D": 2.0 * tokens * model.d_ff / strategy.tensor,
        "t": 4.0 * tokens,
        "w": (biases := 4.0 * model.biases * model.head_dim * (model.heads + 2 * model.kv_heads) / strategy.tensor),
        "u/Y": 4.0 * model.whole_vectors / strategy.tensor_y,
        "n/Y": 4.0 * model.norm_vectors * model.d_model / strategy.tensor_y,
        "v": 4.0 * model.cut_vectors / strategy.tensor - biases * (1 - 1 / strategy.tensor_y),
    }


def terms(model: Decoder, strategy: Strategy, sequences: int) -> Iterator[tuple]:
    """(part, kind, axes, dtype, size, count, per, why) of preset megatron_2d."""
    x, y, twice, again = ("tensor",), ("tensor_y",), int(strategy.again), int(model.remat == "full")
    slot, norm = "backward slot: the forward pass again, from the stage's input", model.norm_vectors
    forward = (
        (RS, y, "bf16", "Q+K", 1, "q, k and v are partial sums, scattered over the heads"),
        (AG, y, "bf16", "Q", 1, "attention's output, for the rows of out that a device has"),
        (AR, y, "bf16", "U", 1, "up is a partial sum"),
        (AR, x, "bf16", "X/Y", 2, "out and down are partial sums"),
        (AR, y, "f32", "t", 2 * norm, "norms: of each token the mean of squares, and the mean"),
    )
    for kind, axes, dtype, size, count, why in forward:
        yield "layer", kind, axes, dtype, size, count, "forward", f"forward: {why}"
        yield "layer", kind, axes, dtype, size, count * twice, "backward", slot
    per = "backward" if model.recomputed is None else "recompute"
    yield "layer", RS, y, "bf16", "Q+K", again, per, "recompute: q, k and v"
    yield "layer", AR, y, "bf16", "U", again, per, "recompute: up"
    yield "layer", AR, x, "bf16", "X/Y", again, per, "recompute: out, for the residual between the halves"
    yield "layer", AG, y, "bf16", "Q", 1, "backward", "backward: attention's output again, for the gradient of out"
    yield "layer", AG, y, "bf16", "Q+K", 1, "backward", "backward: gradients of q, k and v"
    yield "layer", RS, y, "bf16", "Q", 1, "backward", "backward: the gradient of attention's output is a partial sum"
    yield "layer", AR, y, "bf16", "D", 1, "backward", "backward: that of down's input, too"
    yield "layer", AR, x, "bf16", "X/Y", 2, "backward", "backward: dx of qkv and of up"
    yield "layer", AR, y, "f32", "t", 2 * norm * (2 + (model.remat != "none")), "backward", "backward: the same sums, and those of dx"
    yield "layer", AG, y, "f32", "u", 1, "row", "gradients of norms and biases of the width h, after the last microbatch"
    yield "layer", AG, y, "f32", "w", 1, "row", "and of the biases of q, k and v"
    yield "norm", AR, y, "f32", "t", 3 * norm, "microbatch", "the last norm, forward and backward"
    yield "norm", AG, y, "f32", "n", 1, "microbatch", "backward: its gradient"
    yield "embedding", RS, y, "bf16", "X", 1 + twice, "microbatch", "each device looks up its ids; summed, each device its columns"
    yield "embedding", AR, x, "bf16", "X/Y", 1 + twice, "microbatch", "and over tensor"
    yield "embedding", AG, y, "bf16", "X", 1, "microbatch", "backward: full rows of dx, for the ids that a device holds"
    yield "head", AG, y, "bf16", "X", 1, "microbatch", "full rows are multiplied by this device's rows of the head"
    yield "head", RS, y, "bf16", "X", 1, "microbatch", "dx is partial over the vocabulary; formed in the forward"
    yield "head", AR, x, "bf16", "X/Y", 1, "microbatch", "and over tensor"
    if sequences > 1:  # else it is the dx that the embedding has gathered
        yield "positions", AG, y, "f32", "2P", 1, "microbatch", "backward: full rows of their gradient"
    both = ("tensor", "tensor_y")
    yield "loss", AR, both, "f32", "c", 3, "chunk", "of each token: the greatest logit, the sum of exponentials, the label's logit"
