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
WEIGHTS = Group("weights", REPLICAS)
LAYER = Group("layer", REPLICAS)

SUMMED = "gradients, summed once after the last microbatch"
NEW_WEIGHTS = "new weights, from the device that has their moments"
VECTORS = f"{SUMMED}: norms and biases"

FULL_SUM = "each replica gets the full sum, in fp32; the new weights, in bf16, are half of that"
"""The excess of an all-reduce in fp32: 8 bytes a parameter, and 6 is the least."""
FP32_WEIGHTS = "fp32, because the stored weights are replicated; the layers use bf16"
_REPLICATED_SUM = "zero1 keeps gradients replicated by its definition; zero2 reduce-scatters them"
_UNIFORM_LOOP = "one more than there are layers, so that all iterations of a loop are the same"


def replica_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives of gradients and weights over the replicas."""
    strategy = step.strategy
    if strategy.distributed:
        yield from _distributed(step)
    elif strategy.zero:
        yield from _zero(strategy)
    elif strategy.reduction == "bfloat16":
        yield GRADIENTS.all_reduce("Z/2", 1, "step", f"{SUMMED}: matrices and tables, as asked for")
        yield GRADIENTS.all_reduce("G-Z", 1, "step", VECTORS)
    else:
        yield GRADIENTS.all_reduce("G", 1, "step", SUMMED, 0.75, FULL_SUM)


def flat_forms(
    strategy: Strategy, axes: tuple[str, ...], size: str, per: Per, why: str
) -> Iterator[Form]:
    """Yields the gradients of flat vectors to where they are kept, and the new weights from
    there.
    """
    summed = f"{size}/2" if strategy.reduction == "bfloat16" else size
    yield Group("gradients", axes).reduce_scatter(summed, 1, per, why)
    yield Group("weights", axes).all_gather(
        f"{size}/2", 1, per, f"{NEW_WEIGHTS}, as the layers use them"
    )


def _zero(strategy: Strategy) -> Iterator[Form]:
    """Yields those of zero1 and zero2, which shard over data what has a dimension embed."""
    if strategy.reduction == "bfloat16":
        cut = "Z/2"
        cut_why = f"{SUMMED}: matrices and tables, as asked for"
        whole_why = VECTORS
    else:
        cut = "Z"
        cut_why = f"{SUMMED}, each part where its moments are"
        whole_why = f"{SUMMED}, of those with replicated moments: norms and biases"
        if strategy.zero == 1:
            cut_why = f"{SUMMED}, of those with sharded moments"

    if strategy.zero == 1:
        yield GRADIENTS.all_reduce(cut, 1, "step", cut_why, 0.5, _REPLICATED_SUM)
    else:
        yield GRADIENTS.reduce_scatter(cut, 1, "step", cut_why)
    if strategy.zero_by == "layers":
        # Tables are among those with replicated moments.
        yield GRADIENTS.all_reduce("G-Z", 1, "step", whole_why, 0.75, FULL_SUM)
    else:
        yield GRADIENTS.all_reduce("G-Z", 1, "step", whole_why)
    yield WEIGHTS.all_gather("Z", 1, "step", NEW_WEIGHTS, 0.5, FP32_WEIGHTS)


def _distributed(step: Step) -> Iterator[Form]:
    """Yields those of flat vectors: layer by layer, then the tables."""
    strategy = step.strategy
    if strategy.gathered:
        yield from _gathered(step)
    else:
        why = f"{SUMMED}, layer by layer, each part where its moments are"
        yield from flat_forms(strategy, REPLICAS, "R", "row", why)
    if not strategy.staged:
        why = f"{SUMMED}: tables and positions, each part where its moments are"
        yield from flat_forms(strategy, REPLICAS, "J", "step", why)
    yield GRADIENTS.all_reduce("G-Z", 1, "step", VECTORS)


def _gathered(step: Step) -> Iterator[Form]:
    """Yields what layers gather of their flat vectors, and the sums of their gradients, in each
    microbatch.
    """
    gradient = "R/2" if step.strategy.reduction == "bfloat16" else "R"
    why = "forward: the next layer's matrices; in the last layer, its own for the backward"
    yield LAYER.all_gather("R/2", 1, "forward", why)
    why = "backward: the matrices of the layer before; in the first layer, in vain"
    yield LAYER.all_gather("R/2", 1, "regather" if step.model.kept else "backward", why)
    why = "forward: the first layer's matrices, before the loop"
    yield LAYER.all_gather("R/2", 1, "microbatch", why, 0.0, _UNIFORM_LOOP)
    why = "backward: the gradients of the layer after, and at the end those of the first layer"
    yield LAYER.reduce_scatter(gradient, 1, "backward", why)
    why = "backward: in the last layer, of zeros"
    yield LAYER.reduce_scatter(gradient, 1, "microbatch", why, 0.0, _UNIFORM_LOOP)
