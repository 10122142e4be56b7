"""What a microbatch gathers and reduces where fsdp shards weights; and the sums of vectors, which
are replicated but see a part of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.terms import REPLICAS, Form, Group

LAYER = Group("layer", ("fsdp",))
EMBEDDING = Group("embedding", ("fsdp",))
HEAD = Group("head", ("fsdp",))
POSITIONS = Group("positions", ("fsdp",))

SLOT = "backward slot: again, for the forward pass from the stage's input"
FP32_ROWS = (
    "rows are summed in fp32, because a common token's row has many addends; bf16 would be half"
)


def fsdp_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives over fsdp."""
    yield from _matrices(step)
    yield from _vectors(step)
    yield from _tables(step)
    yield from _positions(step)


def _matrices(step: Step) -> Iterator[Form]:
    again = int(step.strategy.again)
    yield LAYER.all_gather("W", 1, "forward", "forward: the layer's matrices, cast first")
    yield LAYER.all_gather("W", again, "backward", SLOT)
    why = "backward: again, also with remat=none; kept, every device would hold the model"
    yield LAYER.all_gather("W", 1, "backward", why)
    if step.strategy.reduction == "float32":
        yield LAYER.reduce_scatter("2W", 1, "backward", "backward: weight gradients, as asked for")
    else:
        why = "backward: weight gradients, in the matmul's type"
        yield LAYER.reduce_scatter("W", 1, "backward", why)


def _vectors(step: Step) -> Iterator[Form]:
    """Yields the sums of norms and biases. With a sharded sequence they are over tensor, too."""
    strategy = step.strategy
    by_batch = ("fsdp", "tensor") if strategy.sp else ("fsdp",)
    vectors = "u/y" if strategy.square else "u"
    last = "n/y" if strategy.square else "n"
    norm = Group("norm", by_batch)
    why = "backward: norms and biases of the width h; under SP also over parts of the sequence"
    yield Group("layer", by_batch).all_reduce(vectors, 1, "backward", why)
    why = "backward: biases that tensor shards, which see full sequences"
    yield LAYER.all_reduce("v", 1, "backward", why)
    if strategy.staged:
        why = "backward: the last norm, in the last stage's branch"
        yield norm.all_reduce(last, 1, "microbatch", why)
    elif step.sums_last_norm_at_once:
        of_all = ("data", "fsdp", *REPLICAS[1:], *by_batch[1:])
        why = "backward: the last norm, which XLA sums over the batch and the replicas at once"
        yield Group("norm", of_all).all_reduce(last, 1, "step", why)
    else:
        why = "backward: the last norm, summed after the last microbatch"
        yield norm.all_reduce(last, 1, "step", why)


def _tables(step: Step) -> Iterator[Form]:
    again = int(step.strategy.again)
    yield EMBEDDING.all_gather("E", 1, "microbatch", "the table, for the lookup")
    yield EMBEDDING.all_gather("E", again, "microbatch", SLOT)
    why = "backward: its gradient"
    yield EMBEDDING.reduce_scatter("2E", 1, "microbatch", why, 0.5, FP32_ROWS)
    why = "its gradient, after the last chunk"
    # No device has both the first stage and the last, so stages gather a tied table twice.
    if step.model.tied and not step.strategy.staged:
        twice = "tied, but reduced once as a table and once as a head"
        yield HEAD.reduce_scatter("2E", 1, "microbatch", why, 0.0, twice)
    else:
        yield HEAD.all_gather("E", 1, "microbatch", "the head, before the chunks")
        yield HEAD.reduce_scatter("2E", 1, "microbatch", why, 0.5, FP32_ROWS)


def _positions(step: Step) -> Iterator[Form]:
    again = int(step.strategy.again)
    yield POSITIONS.all_gather("P", 1, "microbatch", "this device's part of the sequence")
    yield POSITIONS.all_gather("P", again, "microbatch", SLOT)
    why = "backward: summed over the batch"
    excess = "summed in fp32; bf16 would be half"
    yield POSITIONS.reduce_scatter("2P", 1, "microbatch", why, 0.5, excess)
