"""What tensor parallelism sends in one dimension: presets `megatron` and `megatron_sp`."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.terms import Form, Group

LAYER = Group("layer", ("tensor",))
EMBEDDING = Group("embedding", ("tensor",))
POSITIONS = Group("positions", ("tensor",))
HEAD = Group("head", ("tensor",))
LOSS = Group("loss", ("tensor",))

SLOT = "backward slot: the forward pass again, from the stage's input"
OUT_AGAIN = "recompute: out, for the residual between the halves"
LOSS_NUMBERS = "of each token: the greatest logit, the sum of exponentials, the label's logit"


def tensor_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives over tensor."""
    if step.strategy.sp:
        yield from _sharded_sequence(step)
    else:
        yield from _replicated_sequence(step)
    yield LOSS.all_reduce("c", 3, "chunk", LOSS_NUMBERS)


def _replicated_sequence(step: Step) -> Iterator[Form]:
    """Yields those of `megatron`: partial sums of the residual stream."""
    again = int(step.strategy.again)
    full = int(step.model.remat == "full")
    yield LAYER.all_reduce("X", 2, "forward", "forward: out and down sum over tensor")
    yield LAYER.all_reduce("X", 2 * again, "backward", SLOT)
    yield LAYER.all_reduce("X", full, step.model.recompute_per, OUT_AGAIN)
    yield LAYER.all_reduce("X", 2, "backward", "backward: dx of qkv and of up")
    yield EMBEDDING.all_reduce("X", 1, "microbatch", "each device looks up its ids; summed")
    yield EMBEDDING.all_reduce("X", again, "microbatch", SLOT)
    yield HEAD.all_reduce("X", 1, "microbatch", "dx is partial over the vocabulary")


def _sharded_sequence(step: Step) -> Iterator[Form]:
    """Yields those of `megatron_sp`: the residual stream is gathered before each pair of matmuls,
    and reduce-scattered behind it.
    """
    again = int(step.strategy.again)
    full = int(step.model.remat == "full")
    inputs = 0 if step.model.remat == "none" else 2

    why = "forward: attention and the MLP need full sequences"
    yield LAYER.all_gather("X", 2, "forward", why)
    why = "forward: out and down sum over tensor, into a sharded sequence"
    yield LAYER.reduce_scatter("X", 2, "forward", why)
    yield LAYER.all_gather("X", 2 * again, "backward", SLOT)
    yield LAYER.reduce_scatter("X", 2 * again, "backward", SLOT)
    why = "recompute: inputs of qkv and up, which their weight gradients need in full"
    yield LAYER.all_gather("X", inputs, step.model.again_per, why)
    why = f"{OUT_AGAIN}; down's result is not needed"
    yield LAYER.reduce_scatter("X", full, step.model.recompute_per, why)
    why = "backward: dy of out and of down, once for both of their gradients"
    yield LAYER.all_gather("X", 2, "backward", why)
    yield LAYER.reduce_scatter("X", 2, "backward", "backward: dx of qkv and of up")

    why = "each device looks up its ids; summed into a sharded sequence"
    yield EMBEDDING.reduce_scatter("X", 1, "microbatch", why)
    yield EMBEDDING.reduce_scatter("X", again, "microbatch", SLOT)
    why = "backward: the full dx, for the rows that a device holds"
    yield EMBEDDING.all_gather("X", 1, "microbatch", why)
    why = "full sequences are multiplied by this device's rows of the head"
    yield HEAD.all_gather("X", 1, "microbatch", why)
    why = "dx is partial over the vocabulary; formed in the forward"
    yield HEAD.reduce_scatter("X", 1, "microbatch", why)

    # With one sequence it is the dx that the embedding has gathered.
    if step.sequences > 1 or step.strategy.fsdp > 1:
        why = (
            "backward: each device has its part of the sequence, and the table is replicated over "
            "tensor"
        )
        yield POSITIONS.all_gather("p", 1, "microbatch", why)
