"""What replicas send: the sums of gradients and the new weights once a step, and what layers gather
of their flat vectors in each microbatch.

A step can do no less for a matrix that replicas share than add up its gradient once, in fp32, and
give each replica the new weight in the type in which its layers use it: 4 and 2 bytes a parameter
on the wire, 2 and 2 where gradients are summed in bf16. That is the least, which preset
`distributed` sends; all else is `excess`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.subjects import Step, Strategy
from mesh_lm.planning.closed_forms.terms import REPLICAS, Form, Group, Per

GRADIENTS = Group("gradients", REPLICAS)
ZERO_WEIGHTS = Group("weights", ("data",))
NODE = ("node",)
ISLANDS = Group("weights", ("island",))

SUMMED = "gradients, summed once after the last microbatch"
NEW_WEIGHTS = "new weights, from the device that has their moments"
VECTORS = f"{SUMMED}: norms and biases"

FULL_SUM = "each replica gets the full sum, in fp32; the new weights, in bf16, are half of that"
"""The excess of an all-reduce in fp32: 8 bytes a parameter, and 6 is the least."""
FP32_WEIGHTS = "fp32, because the stored weights are replicated; the layers use bf16"
_REPLICATED_SUM = "zero1 keeps gradients replicated by its definition; zero2 reduce-scatters them"
_SUM_OVER_TOKENS = "the shards of a sequence get the full sum, too"
_UNIFORM_LOOP = "one more than there are layers, so that all iterations of a loop are the same"


def replica_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives of gradients and weights over the replicas."""
    strategy = step.strategy
    if strategy.distributed:
        yield from _distributed(step)
    elif strategy.zero:
        yield from _zero(strategy)
    elif strategy.sums_in_steps:
        yield from stepwise_sums(strategy, REPLICAS, "", f"{SUMMED}: matrices and tables")
        yield GRADIENTS.all_reduce("G-Z", 1, "step", VECTORS)
    elif strategy.reduction == "bfloat16":
        yield GRADIENTS.all_reduce("Z/2", 1, "step", f"{SUMMED}: matrices and tables, as asked for")
        yield GRADIENTS.all_reduce("G-Z", 1, "step", VECTORS)
    else:
        yield GRADIENTS.all_reduce("G", 1, "step", SUMMED, 0.75, FULL_SUM)


def outer_forms() -> Iterator[Form]:
    """Yields what an outer step of islands sends."""
    yield ISLANDS.all_reduce("O", 1, "step", "the weights of the islands, which are averaged")


def stepwise_sums(
    strategy: Strategy, axes: tuple[str, ...], family: str, why: str
) -> Iterator[Form]:
    """Yields the sums of matrices' gradients in int8, or in two levels by node.

    family: of the arrays, "" or "t" (see `sizes`).
    """
    if strategy.reduction == "int8":
        gradients = Group("gradients", axes)
        for size, words in ((f"I{family}", "in int8"), (f"i{family}", "the scales")):
            yield gradients.all_to_all(
                size, 1, "step", f"{why}, {words}, to where a part is summed"
            )
            yield gradients.all_gather(size, 1, "step", f"{why}, {words}, the sums")
        return
    across = tuple(axis for axis in axes if axis != "node")
    half = "/2" if strategy.reduction == "bfloat16" else ""
    inside = Group("gradients", NODE)
    yield inside.reduce_scatter(f"M{family}{half}", 1, "step", f"{why}, inside a node")
    yield Group("gradients", across).all_reduce(
        f"M{family}/N{half}", 1, "step", f"{why}, parts across nodes"
    )
    yield inside.all_gather(f"M{family}{half}", 1, "step", f"{why}, the sums inside a node")


def vector_forms(
    strategy: Strategy, axes: tuple[str, ...], size: str, per: Per, why: str
) -> Iterator[Form]:
    """Yields the gradients of flat vectors to where they are kept, and the new weights from
    there.
    """
    gradients = Group("gradients", axes)
    weights = Group("weights", axes)
    new = f"{NEW_WEIGHTS}, as the layers use them"
    half = "/2" if strategy.reduction == "bfloat16" else ""
    if strategy.node > 1:
        across = tuple(axis for axis in axes if axis != "node")
        gradients = Group("gradients", across)
        weights = Group("weights", across)
        inside = Group("gradients", NODE)
        if strategy.reduction != "int8":
            yield inside.reduce_scatter(f"{size}{half}", 1, per, f"{why}, inside a node")
            yield gradients.reduce_scatter(f"{size}/N{half}", 1, per, f"{why}, across nodes")
        yield weights.all_gather(f"{size}/N/2", 1, per, f"{new}, across nodes")
        yield Group("weights", NODE).all_gather(f"{size}/2", 1, per, f"{new}, inside a node")
        return
    if strategy.reduction == "int8":
        yield gradients.all_to_all(f"I{size.lower()}", 1, per, f"{why}, in int8")
        yield gradients.all_to_all(f"i{size.lower()}", 1, per, f"{why}, the scales")
    else:
        yield gradients.reduce_scatter(f"{size}{half}", 1, per, why)
    yield weights.all_gather(f"{size}/2", 1, per, new)


def needed_of_zero(strategy: Strategy, n_replicas: int) -> float:
    """Returns the part that is needed of new weights that are gathered in fp32 over data: the least
    is in bf16, over all replicas.
    """
    if strategy.data == 1:
        return 1.0
    return 0.5 * (1 - 1 / n_replicas) / (1 - 1 / strategy.data)


def _zero(strategy: Strategy) -> Iterator[Form]:
    """Yields those of zero1 and zero2, which shard over data what has a dimension embed."""
    yield from _zero_sums(strategy)
    whole_why = VECTORS
    if strategy.reduction in ("auto", "float32"):
        whole_why = f"{SUMMED}, of those with replicated moments: norms and biases"
    if strategy.zero_by == "layers":
        # Tables are among those with replicated moments.
        yield GRADIENTS.all_reduce("G-Z", 1, "step", whole_why, 0.75, FULL_SUM)
    else:
        yield GRADIENTS.all_reduce("G-Z", 1, "step", whole_why)
    needed = needed_of_zero(strategy, strategy.replicas)
    yield ZERO_WEIGHTS.all_gather("Z", 1, "step", NEW_WEIGHTS, needed, FP32_WEIGHTS)
    if strategy.owner and strategy.tensor > 1:
        yield from _owner_exchanges()


def _owner_exchanges() -> Iterator[Form]:
    """Yields what brings complete matrices to their owners where tensor shards them."""
    gradients = Group("gradients", ("tensor",))
    weights = Group("weights", ("tensor",))
    yield gradients.all_to_all("A", 1, "step", "gradients, to the owners of complete matrices")
    yield weights.all_to_all("A", 1, "step", "weights, to the owners of complete matrices")
    yield weights.all_to_all("A", 1, "step", "new weights, back from the owners")
    of_vectors = Group("weights", ("data", "tensor"))
    why = f"{NEW_WEIGHTS}: vectors that tensor does not shard"
    yield of_vectors.all_gather("a", 1, "step", why, 0.5, FP32_WEIGHTS)


def _zero_sums(strategy: Strategy) -> Iterator[Form]:
    """Yields the sums of gradients whose moments are sharded."""
    why = f"{SUMMED}, each part where its moments are"
    if strategy.reduction == "bfloat16":
        why = f"{SUMMED}: matrices and tables, as asked for"
    elif strategy.zero == 1:
        why = f"{SUMMED}, of those with sharded moments"

    size = "Z/2" if strategy.reduction == "bfloat16" else "Z"
    if strategy.sums_in_steps:
        yield from stepwise_sums(strategy, REPLICAS, "", why)
    elif strategy.zero == 1:
        yield GRADIENTS.all_reduce(size, 1, "step", why, 0.5, _REPLICATED_SUM)
    elif strategy.token_shards > 1:
        yield GRADIENTS.all_reduce(size, 1, "step", why, 0.5, _SUM_OVER_TOKENS)
    else:
        yield GRADIENTS.reduce_scatter(size, 1, "step", why)


def _distributed(step: Step) -> Iterator[Form]:
    """Yields those of flat vectors: layer by layer, then the tables."""
    strategy = step.strategy
    if strategy.gathered:
        yield from gathered_forms(step, REPLICAS, "R", "R/2")
    else:
        why = f"{SUMMED}, layer by layer, each part where its moments are"
        yield from vector_forms(strategy, REPLICAS, "R", "row", why)
    if not strategy.staged:
        why = f"{SUMMED}: tables and positions, each part where its moments are"
        yield from vector_forms(strategy, REPLICAS, "J", "step", why)
    yield GRADIENTS.all_reduce("G-Z", 1, "step", VECTORS)


def gathered_forms(step: Step, axes: tuple[str, ...], size: str, weights: str) -> Iterator[Form]:
    """Yields what layers gather of their flat vectors, and the sums of their gradients, in each
    microbatch.

    size: of the vectors in fp32; weights: as the layers use them.
    """
    layer = Group("layer", axes)
    gradient = f"{size}/2" if step.strategy.reduction == "bfloat16" else size
    why = "forward: the next layer's matrices; in the last layer, its own for the backward"
    is_each_layer = not step.model.kept and not step.model.unrolled
    yield layer.all_gather(weights, 1, "forward" if is_each_layer else "gather", why)
    why = "backward: the matrices of the layer before; in the first layer, in vain"
    yield layer.all_gather(weights, 1, "backward" if is_each_layer else "regather", why)
    why = "forward: the first layer's matrices, before the loop"
    yield layer.all_gather(weights, 1, "microbatch", why, 0.0, _UNIFORM_LOOP)
    why = "backward: the gradients of the layer after, and at the end those of the first layer"
    yield layer.reduce_scatter(gradient, 1, "backward", why)
    why = "backward: in the last layer, of zeros"
    yield layer.reduce_scatter(gradient, 1, "microbatch", why, 0.0, _UNIFORM_LOOP)
