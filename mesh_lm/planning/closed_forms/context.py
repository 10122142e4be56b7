"""What attention exchanges over sequences that mesh axes shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.tensor import SLOT
from mesh_lm.planning.closed_forms.terms import Form, Group

SEQUENCE = Group("layer", ("sequence",))
ULYSSES = Group("layer", ("ulysses",))


def context_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives of attention over sequence and ulysses."""
    for form in _of_attention(step):
        # In two dimensions of tensor parallelism a device has a y-th of the heads.
        yield form._replace(size=f"{form.size}/y") if step.strategy.square else form


def _of_attention(step: Step) -> Iterator[Form]:
    parts = step.strategy.parts
    if "ulysses" in parts:
        yield from _heads_for_tokens(step, SEQUENCE)
    if "usp" in parts:
        yield from _heads_for_tokens(step, ULYSSES)
    if parts & {"ring", "usp"}:
        for window in step.model.windows:
            yield from _ring(step, window)
    elif "context_gather" in parts:
        yield from _gathered_keys(step)


def _heads_for_tokens(step: Step, group: Group) -> Iterator[Form]:
    """Yields the exchanges of Ulysses. With remat=full, the layer's forward pass again."""
    again = int(step.strategy.again)
    full = int(step.model.remat == "full")
    per = step.model.recompute_per
    queries = "queries, keys and values of all tokens for a part of the heads"
    yield group.all_to_all("Q+K", 1, "forward", f"forward: {queries}")
    yield group.all_to_all("Q+K", again, "backward", SLOT)
    yield group.all_to_all("Q+K", full, per, f"recompute: {queries}")
    yield group.all_to_all("Q+K", 1, "backward", f"backward: gradients of {queries}")
    yield group.all_to_all("Q", 1, "forward", "forward: the output, back")
    yield group.all_to_all("Q", again, "backward", SLOT)
    yield group.all_to_all("Q", full, per, "recompute: the output, back")
    yield group.all_to_all("Q", 1, "backward", "backward: gradients of the output")


def _ring(step: Step, window: int | None) -> Iterator[Form]:
    """Yields the permutes of a ring in the layers with a window: one for each further device whose
    keys are in it.
    """
    hops, hops_in_loops = ring_hops(step, window)
    again = int(step.strategy.again)
    full = int(step.model.remat == "full")
    share = 1 / len(step.model.windows)
    # The backward pass reads what the recomputation has received, except in the loops over steps.
    why = (
        "recompute: keys and values go around; the backward pass reads those of the hops outside "
        "of the loop"
    )
    forms = (
        SEQUENCE.permute("K", hops, "forward", "forward: keys and values go around"),
        SEQUENCE.permute("K", again * hops, "backward", SLOT),
        SEQUENCE.permute("K", full * hops_in_loops, step.model.recompute_per, why),
        SEQUENCE.permute("K", hops, "backward", "backward: keys and values go around again"),
        SEQUENCE.permute(
            "2K", hops, "backward", "backward: their gradients, summed in fp32 on the way"
        ),
    )
    for form in forms:
        yield form._replace(share=share)


def ring_hops(step: Step, window: int | None) -> tuple[int, int]:
    """Returns the permutes of a ring, and those that are in loops: runs of several steps with the
    same distances to the step before and to the next one.

    Without a window keys go to all other devices: there is a loop of n - 3 steps from five devices
    on. With one they go to the nearest devices in both directions.
    """
    size = step.strategy.sequence
    chunk = step.model.seq // (2 * size)
    steps = list(range(size))
    if window is not None:
        farthest = math.ceil((window - 1) / chunk)
        steps = [t for t in steps if min(t, size - t) <= farthest]
    distances = [b - a for a, b in itertools.pairwise(steps)]
    # The distance that keys came for each step after the first, and that they go next.
    walk = list(zip([0, *distances[1:]], [*distances[1:], 0], strict=True))
    in_loops = 0
    for (_, next_hop), run in itertools.groupby(walk):
        n_steps = len(list(run))
        if n_steps > 1 and next_hop:
            in_loops += n_steps
    return len(distances), in_loops


def _gathered_keys(step: Step) -> Iterator[Form]:
    again = int(step.strategy.again)
    yield SEQUENCE.all_gather("CK", 1, "forward", "forward: keys and values of all tokens")
    yield SEQUENCE.all_gather("CK", again, "backward", SLOT)
    if step.model.remat != "none":
        why = "recompute: again; kept, each device would hold those of all layers"
        yield SEQUENCE.all_gather("CK", 1, step.model.again_per, why)
    yield SEQUENCE.reduce_scatter("CK", 1, "backward", "backward: their gradients")
