"""The closed forms of two-dimensional tensor parallelism, and the bytes of tensor parallelism in
one, two and more dimensions, on paper.

x, y: devices along `tensor` and `tensor_y`. A matrix is sharded along both of its dimensions, the
residual stream along embed over y. So queries, keys, values and up are partial sums over y, out and
down over x. Pure arithmetic, as in closed_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.sharding_rules.closed_forms_context import AG, AR, RS
from tests.sharding_rules.subjects import Decoder, Strategy

SYMBOLS = {
    "X/y": ("X / y", "bf16", "a device's columns of the residual stream"),
    "U": ("2 b s x columns of up (and gate) / T", "bf16", "what up returns, with full rows"),
    "d": ("2 b s x rows of down / T", "bf16", "the gradient of what down reads"),
    "u/y": ("u / y", "f32", "gradients of norms and biases, summed over the batch"),
    "n/y": ("n / y", "f32", "the gradient of the last norm"),
    "t": ("4 b s", "f32", "one number per token: a sum of a norm"),
    "w": ("4 x biases of q, k and v / T", "f32", "gradients of biases of heads over tensor_y"),
}


def sizes(model: Decoder, strategy: Strategy, b: int) -> dict[str, float]:
    """Symbol -> bytes."""
    tokens = b * model.seq / (strategy.sequence * strategy.ulysses)
    return {
        "X/y": 2.0 * tokens * model.d_model / strategy.tensor_y,
        "U": 2.0 * tokens * model.d_ff * (1 + model.gated) / strategy.tensor,
        "d": 2.0 * tokens * model.d_ff / strategy.tensor,
        "t": 4.0 * tokens,
        "w": (
            biases := 4.0
            * model.biases
            * model.head_dim
            * (model.heads + 2 * model.kv_heads)
            / strategy.tensor
        ),
        "u/y": 4.0 * model.whole_vectors / strategy.tensor_y,
        "n/y": 4.0 * model.norm_vectors * model.d_model / strategy.tensor_y,
        "v": 4.0 * model.cut_vectors / strategy.tensor - biases * (1 - 1 / strategy.tensor_y),
    }


def terms(model: Decoder, strategy: Strategy, sequences: int) -> Iterator[tuple]:
    """(part, kind, axes, dtype, size, count, per, why) of preset megatron_2d."""
    x, y, twice, again = ("tensor",), ("tensor_y",), int(strategy.again), int(model.remat == "full")
    slot, norm = "backward slot: the forward pass again, from the stage's input", model.norm_vectors
    scattered = model.kv_heads % strategy.matrix_shards == 0
    heads, whole = "Q+K" if scattered else "Q", int(not scattered)
    forward = (
        (RS, y, "bf16", heads, 1, "q, k and v are partial sums, scattered over the heads"),
        (AR, y, "bf16", "K", whole, "k and v of too few heads to scatter"),
        (AG, y, "bf16", "Q", 1, "attention's output, for the rows of out that a device has"),
        (AR, y, "bf16", "U", 1, "up is a partial sum"),
        (AR, x, "bf16", "X/y", 2, "out and down are partial sums"),
        (
            AR,
            y,
            "f32",
            "t",
            2 * norm,
            "of each token the mean of squares, for LayerNorm the mean, too",
        ),
    )
    for kind, axes, dtype, size, count, why in forward:
        yield "layer", kind, axes, dtype, size, count, "forward", f"forward: {why}"
        yield "layer", kind, axes, dtype, size, count * twice, "backward", slot
    per = "backward" if model.recomputed is None else "recompute"
    yield "layer", RS, y, "bf16", heads, again, per, "recompute: q, k and v"
    yield "layer", AR, y, "bf16", "K", again * whole, per, "recompute: k and v"
    yield "layer", AR, y, "bf16", "U", again, per, "recompute: up"
    yield (
        "layer",
        AR,
        x,
        "bf16",
        "X/y",
        again,
        per,
        "recompute: out, for the residual between the halves",
    )
    yield (
        "layer",
        AG,
        y,
        "bf16",
        "Q",
        1,
        "backward",
        "backward: attention's output again, for the gradient of out",
    )
    yield "layer", AG, y, "bf16", heads, 1, "backward", "backward: gradients of q, k and v"
    yield (
        "layer",
        AR,
        y,
        "bf16",
        "K",
        whole,
        "backward",
        "backward: gradients of k and v, of the query heads of a device",
    )
    yield (
        "layer",
        RS,
        y,
        "bf16",
        "Q",
        1,
        "backward",
        "backward: the gradient of attention's output is a partial sum",
    )
    yield "layer", AR, y, "bf16", "d", 1, "backward", "backward: that of down's input, too"
    yield "layer", AR, x, "bf16", "X/y", 2, "backward", "backward: dx of qkv and of up"
    yield (
        "layer",
        AR,
        y,
        "f32",
        "t",
        2 * norm * (2 + (model.remat != "none")),
        "backward",
        "backward: the same sums, and those of dx",
    )
    yield (
        "layer",
        AG,
        y,
        "f32",
        "u",
        1,
        "row",
        "gradients of norms and biases of the width h, after the last microbatch",
    )
    yield "layer", AG, y, "f32", "w", 1, "row", "and of the biases of q, k and v"
    yield "norm", AR, y, "f32", "t", 3 * norm, "microbatch", "the last norm, forward and backward"
    yield "norm", AG, y, "f32", "n", 1, "microbatch", "backward: its gradient"
    yield (
        "embedding",
        RS,
        y,
        "bf16",
        "X",
        1 + twice,
        "microbatch",
        "each device looks up its ids; summed, a device its columns",
    )
    yield (
        "embedding",
        AR,
        x,
        "bf16",
        "X/y",
        1 + twice,
        "microbatch",
        "each device looks up its ids; summed over tensor_y first",
    )
    yield (
        "embedding",
        AG,
        y,
        "bf16",
        "X",
        1,
        "microbatch",
        "backward: full rows of dx, for the ids that a device holds",
    )
    yield (
        "head",
        AG,
        y,
        "bf16",
        "X",
        1,
        "microbatch",
        "full rows are multiplied by this device's rows of the head",
    )
    yield (
        "head",
        RS,
        y,
        "bf16",
        "X",
        1,
        "microbatch",
        "dx is partial over the vocabulary; formed in the forward",
    )
    yield (
        "head",
        AR,
        x,
        "bf16",
        "X/y",
        1,
        "microbatch",
        "dx is partial over the vocabulary; summed over tensor_y first",
    )
    if sequences > 1:  # else it is the dx that the embedding has gathered
        yield (
            "positions",
            AG,
            y,
            "f32",
            "2P",
            1,
            "microbatch",
            "backward: full rows of their gradient",
        )
    both = ("tensor", "tensor_y")
    yield (
        "loss",
        AR,
        both,
        "f32",
        "c",
        3,
        "chunk",
        "of each token: the greatest logit, the sum of exponentials, the label's logit",
    )


# Elements that each of t devices sends in one layer of GPT (d_ff = 4 h), forward and backward, for
# all their tokens, in units of h^2 / t. r = tokens / h. Norms are left out.


def one(r: float, t: int) -> float:
    """Tensor parallelism in one dimension: four all-reduces of the residual stream."""
    return 8 * r * (t - 1)


def two(r: float, x: int, y: int) -> float:
    """In two dimensions, as `terms`: 25 (y - 1) of q, k, v (9) and the MLP (16), 8 (x - 1) of the
    residual stream's columns."""
    return r * (25 * (y - 1) + 8 * (x - 1))


def two_and_a_half(r: float, q: int, d: int) -> float:
    """2.5D on q x q x d devices (arXiv 2105.14500, after Solomonik and Demmel): the tokens are
    divided d ways, each matmul runs by SUMMA.

    SUMMA broadcasts two of three operands along the rows and columns of q x q devices, in each of
    three matmuls: 7 h columns of inputs, and 12 h^2 weights. Gradients of the weights are summed
    over d.
    """
    return (q - 1) * (21 * r + 36 * d) + 24 * (d - 1)


def three(r: float, p: int) -> float:
    """3D on p^3 devices (arXiv 2105.14450, after Agarwal et al.): each operand is gathered or
    reduce-scattered along one of three axes.

    The 7 h columns of inputs and 12 h^2 weights three times, the 9 h columns of outputs twice,
    their gradient being gathered once.
    """
    return (p - 1) * (39 * r + 36)


def with_fsdp(r: float, d: int, z: int, x: int, y: int) -> float:
    """The rules' own: tokens over d (data) and z (fsdp), matrices over x and y. Per microbatch of
    one, with sums over d once."""
    return two(r, x, y) + 36 * d * (z - 1) + 24 * (d - 1)
