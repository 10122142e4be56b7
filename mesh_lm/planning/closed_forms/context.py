"""What attention exchanges over sequences that mesh axes shard."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.tensor import recompute_of
from mesh_lm.planning.closed_forms.terms import Form, Group

RING = Group("layer", ("sequence",))
ULYSSES = Group("layer", ("sequence",))
ULYSSES_IN_RING = Group("layer", ("ulysses",))


def context_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives of attention over sequence and ulysses."""
    parts = step.strategy.parts
    if "ulysses" in parts:
        yield from _heads_for_tokens(step, ULYSSES)
    if "usp" in parts:
        yield from _heads_for_tokens(step, ULYSSES_IN_RING)
    if parts & {"ring", "usp"}:
        yield from _ring(step)
    elif "context_gather" in parts:
        yield from _gathered_keys(step)


def _heads_for_tokens(step: Step, group: Group) -> Iterator[Form]:
    """Yields the exchanges of Ulysses. With remat=full, the layer's forward pass again."""
    full = int(step.model.remat == "full")
    per = recompute_of(step.model)
    queries = "queries, keys and values of all tokens for a part of the heads"
    yield group.all_to_all("Q+K", 1, "forward", f"forward: {queries}")
    yield group.all_to_all("Q+K", full, per, f"recompute: {queries}")
    yield group.all_to_all("Q+K", 1, "backward", f"backward: gradients of {queries}")
    yield group.all_to_all("Q", 1, "forward", "forward: the output, back")
    yield group.all_to_all("Q", full, per, "recompute: the output, back")
    yield group.all_to_all("Q", 1, "backward", "backward: gradients of the output")


def _ring(step: Step) -> Iterator[Form]:
    """Yields the permutes of a ring, one for each further device."""
    hops = step.strategy.sequence - 1
    # The backward pass reads what the recomputation has received, except in the loop over steps,
    # which a ring of 5 or more has.
    hops_in_loop = hops - 2 if hops > 3 else 0
    full = int(step.model.remat == "full")
    yield RING.permute("K", hops, "forward", "forward: keys and values go around")
    why = (
        "recompute: keys and values go around; the backward pass reads those of the hops outside "
        "of the loop"
    )
    yield RING.permute("K", full * hops_in_loop, recompute_of(step.model), why)
    yield RING.permute("K", hops, "backward", "backward: keys and values go around again")
    why = "backward: their gradients, summed in fp32 on the way"
    yield RING.permute("2K", hops, "backward", why)


def _gathered_keys(step: Step) -> Iterator[Form]:
    yield RING.all_gather("CK", 1, "forward", "forward: keys and values of all tokens")
    if step.model.remat != "none":
        why = "recompute: again; kept, each device would hold those of all layers"
        yield RING.all_gather("CK", 1, "backward", why)
    yield RING.reduce_scatter("CK", 1, "backward", "backward: their gradients")
