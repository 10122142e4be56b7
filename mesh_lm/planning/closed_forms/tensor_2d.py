"""What tensor parallelism sends in two dimensions (preset `megatron_2d`), and the bytes of one, two
and more dimensions on paper.

x, y: devices along `tensor` and `tensor_y`. A matrix is sharded along both of its dimensions, the
residual stream along embed over y. So queries, keys, values and up are partial sums over y, out and
down over x.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.tensor import LOSS_NUMBERS, OUT_AGAIN, SLOT
from mesh_lm.planning.closed_forms.terms import Form, Group

X_AXIS = ("tensor",)
Y_AXIS = ("tensor_y",)
LAYER_X = Group("layer", X_AXIS)
LAYER_Y = Group("layer", Y_AXIS)
NORM = Group("norm", Y_AXIS)
POSITIONS = Group("positions", Y_AXIS)
EMBEDDING_X = Group("embedding", X_AXIS)
EMBEDDING_Y = Group("embedding", Y_AXIS)
HEAD_X = Group("head", X_AXIS)
HEAD_Y = Group("head", Y_AXIS)
LOSS = Group("loss", (*X_AXIS, *Y_AXIS))


def tensor_2d_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives over tensor and tensor_y."""
    yield from _layer_forward(step)
    yield from _layer_recompute(step)
    yield from _layer_backward(step)
    yield from _outside(step)
    yield LOSS.all_reduce("c", 3, "chunk", LOSS_NUMBERS)


def _scatters_all_heads(step: Step) -> bool:
    """Whether tensor_y divides the kv heads, so that q, k and v are scattered in one array."""
    return step.model.kv_heads % step.strategy.matrix_shards == 0


def _layer_forward(step: Step) -> Iterator[Form]:
    """Yields a layer's forward pass, each collective beside its repetition in a backward slot."""
    scattered = _scatters_all_heads(step)
    heads = "Q+K" if scattered else "Q"
    norms = 2 * step.model.norm_vectors
    forms = (
        LAYER_Y.reduce_scatter(
            heads, 1, "forward", "q, k and v are partial sums, scattered over the heads"
        ),
        LAYER_Y.all_reduce(
            "K", int(not scattered), "forward", "k and v of too few heads to scatter"
        ),
        LAYER_Y.all_gather(
            "Q", 1, "forward", "attention's output, for the rows of out that a device has"
        ),
        LAYER_Y.all_reduce("U", 1, "forward", "up is a partial sum"),
        LAYER_X.all_reduce("X/y", 2, "forward", "out and down are partial sums"),
        LAYER_Y.all_reduce(
            "t", norms, "forward", "of each token the mean of squares, for LayerNorm the mean, too"
        ),
    )
    for form in forms:
        yield form._replace(why=f"forward: {form.why}")
        yield form._replace(count=form.count * step.strategy.again, per="backward", why=SLOT)


def _layer_recompute(step: Step) -> Iterator[Form]:
    """Yields what remat=full repeats, and remat=save_attention of the MLP."""
    full = int(step.model.remat == "full")
    mlp = int(step.model.remat in ("full", "save_attention"))
    scattered = _scatters_all_heads(step)
    heads = "Q+K" if scattered else "Q"
    per = step.model.recompute_per
    yield LAYER_Y.reduce_scatter(heads, full, per, "recompute: q, k and v")
    yield LAYER_Y.all_reduce("K", full * (not scattered), per, "recompute: k and v")
    yield LAYER_Y.all_reduce("U", mlp, per, "recompute: up")
    yield LAYER_X.all_reduce("X/y", full, per, OUT_AGAIN)


def _layer_backward(step: Step) -> Iterator[Form]:
    scattered = _scatters_all_heads(step)
    heads = "Q+K" if scattered else "Q"
    norms = 2 * step.model.norm_vectors
    norms_again = norms * (step.model.remat != "none")
    why = "backward: attention's output again, for the gradient of out"
    yield LAYER_Y.all_gather("Q", 1, "backward", why)
    yield LAYER_Y.all_gather(heads, 1, "backward", "backward: gradients of q, k and v")
    why = "backward: gradients of k and v, of the query heads of a device"
    yield LAYER_Y.all_reduce("K", int(not scattered), "backward", why)
    why = "backward: the gradient of attention's output is a partial sum"
    yield LAYER_Y.reduce_scatter("Q", 1, "backward", why)
    yield LAYER_Y.all_reduce("d", 1, "backward", "backward: that of down's input, too")
    yield LAYER_X.all_reduce("X/y", 2, "backward", "backward: dx of qkv and of up")
    yield LAYER_Y.all_reduce("t", norms_again, step.model.again_per, "recompute: the same sums")
    yield LAYER_Y.all_reduce("t", 2 * norms, "backward", "backward: the same sums, and those of dx")
    why = "gradients of norms and biases of the width h, after the last microbatch"
    yield LAYER_Y.all_gather("u", 1, "row", why)
    yield LAYER_Y.all_gather("w", 1, "row", "and of the biases of q, k and v")


def _outside(step: Step) -> Iterator[Form]:
    """Yields those of the last norm, the tables and the positions."""
    lookups = 1 + step.strategy.again
    norms = 3 * step.model.norm_vectors
    yield NORM.all_reduce("t", norms, "microbatch", "the last norm, forward and backward")
    yield NORM.all_gather("n", 1, "microbatch", "backward: its gradient")
    why = "each device looks up its ids; summed, a device its columns"
    yield EMBEDDING_Y.reduce_scatter("X", lookups, "microbatch", why)
    why = "each device looks up its ids; summed over tensor_y first"
    yield EMBEDDING_X.all_reduce("X/y", lookups, "microbatch", why)
    why = "backward: full rows of dx, for the ids that a device holds"
    yield EMBEDDING_Y.all_gather("X", 1, "microbatch", why)
    why = "full rows are multiplied by this device's rows of the head"
    yield HEAD_Y.all_gather("X", 1, "microbatch", why)
    why = "dx is partial over the vocabulary; formed in the forward"
    yield HEAD_Y.reduce_scatter("X", 1, "microbatch", why)
    why = "dx is partial over the vocabulary; summed over tensor_y first"
    yield HEAD_X.all_reduce("X/y", 1, "microbatch", why)
    # With one sequence it is the dx that the embedding has gathered.
    if step.sequences > 1:
        yield POSITIONS.all_gather("2P", 1, "microbatch", "backward: full rows of their gradient")


# Elements that each of t devices sends in one layer of GPT (d_ff = 4 h), forward and backward, for
# all their tokens, in units of h^2 / t. r = tokens / h. Norms are left out.


def one(r: float, t: int) -> float:
    """Returns those of one dimension: four all-reduces of the residual stream."""
    return 8 * r * (t - 1)


def two(r: float, x: int, y: int) -> float:
    """Returns those of two dimensions, as `tensor_2d_forms`: 25 (y - 1) of q, k, v (9) and the MLP
    (16), 8 (x - 1) of the residual stream's columns.
    """
    return r * (25 * (y - 1) + 8 * (x - 1))


def two_and_a_half(r: float, q: int, d: int) -> float:
    """Returns those of 2.5D on q x q x d devices (arXiv 2105.14500, after Solomonik and Demmel):
    the tokens are divided d ways, each matmul runs by SUMMA.

    SUMMA broadcasts two of three operands along the rows and columns of q x q devices, in each of
    three matmuls: 7 h columns of inputs, and 12 h^2 weights. Gradients of the weights are summed
    over d.
    """
    return (q - 1) * (21 * r + 36 * d) + 24 * (d - 1)


def three(r: float, p: int) -> float:
    """Returns those of 3D on p^3 devices (arXiv 2105.14450, after Agarwal et al.): each operand is
    gathered or reduce-scattered along one of three axes.

    The 7 h columns of inputs and 12 h^2 weights three times, the 9 h columns of outputs twice,
    their gradient being gathered once.
    """
    return (p - 1) * (39 * r + 36)


def with_fsdp(r: float, d: int, z: int, x: int, y: int) -> float:
    """Returns those of the rules: tokens over d (data) and z (fsdp), matrices over x and y. Per
    microbatch of one, with sums over d once.
    """
    return two(r, x, y) + 36 * d * (z - 1) + 24 * (d - 1)
