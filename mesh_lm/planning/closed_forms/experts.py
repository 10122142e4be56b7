"""What a mixture of experts sends: tokens to the devices of their experts and back, and the sums of
the experts' gradients, which are replicated over fewer devices than other gradients.

The exchange is that of the first round, which is all of it while routing is balanced
(`mesh_lm.planning.experts`).
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.replicas import (
    FULL_SUM,
    NEW_WEIGHTS,
    SUMMED,
    gathered_forms,
    vector_forms,
)
from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.terms import REPLICAS, Form, Group

EXCHANGE = Group("experts", ("expert",))
EXPERT_REPLICAS = tuple(axis for axis in REPLICAS if axis != "expert")
"""The axes along which the weights of an expert are replicated."""


def expert_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives of experts; none without them."""
    if not step.model.experts:
        return
    if step.strategy.exchange == "padded":
        yield from _padded(step)
    else:
        yield from _gathered_tokens(step)
    yield from _sums(step)


def _padded(step: Step) -> Iterator[Form]:
    """Yields all-to-alls of rows of equal number. A saved delivery is not repeated."""
    full = int(step.model.remat == "full")
    per = step.model.recompute_per
    for size, words in (("D", "tokens"), ("e", "their experts"), ("g", "the experts' weights")):
        why = f"{words} to the devices of their experts"
        yield EXCHANGE.all_to_all(size, 1, "forward", f"forward: {why}")
        yield EXCHANGE.all_to_all(size, full, per, f"recompute: {why}")
    yield EXCHANGE.all_to_all("D", 1, "forward", "forward: the results, back")
    yield EXCHANGE.all_to_all("D", 1, "backward", "backward: gradients of the results")
    yield EXCHANGE.all_to_all("D", 1, "backward", "backward: gradients of the tokens, back")
    yield EXCHANGE.all_to_all("g", 1, "backward", "backward: gradients of the weights, back")


def _gathered_tokens(step: Step) -> Iterator[Form]:
    """Yields gathers of all tokens, and reduce-scatters of results."""
    full = int(step.model.remat == "full")
    per = step.model.recompute_per
    for size, words in (("D", "tokens"), ("e", "their experts"), ("g", "the experts' weights")):
        yield EXCHANGE.all_gather(size, 1, "forward", f"forward: {words} of all devices")
        yield EXCHANGE.all_gather(size, full, per, f"recompute: {words} of all devices")
    yield EXCHANGE.reduce_scatter("D", 1, "forward", "forward: the results")
    yield EXCHANGE.all_gather("D", 1, "backward", "backward: gradients of the results")
    yield EXCHANGE.reduce_scatter("D", 1, "backward", "backward: gradients of the tokens")
    yield EXCHANGE.reduce_scatter("g", 1, "backward", "backward: gradients of the weights")


def _sums(step: Step) -> Iterator[Form]:
    """Yields the sums of the experts' gradients, and their new weights."""
    strategy = step.strategy
    if strategy.gathered:
        yield from gathered_forms(step, EXPERT_REPLICAS, "Re", "Re/2")
        yield from gathered_forms(step, REPLICAS, "r", "r")
    elif strategy.distributed:
        why = f"{SUMMED}: experts, layer by layer, each part where its moments are"
        yield from vector_forms(strategy, EXPERT_REPLICAS, "Re", "row", why)
        why = f"{SUMMED}: routers"
        yield Group("gradients", REPLICAS).reduce_scatter("r", 1, "row", why)
        why = f"{NEW_WEIGHTS}, in fp32, in which routers are used"
        yield Group("weights", REPLICAS).all_gather("r", 1, "row", why)
    else:
        gradients = Group("gradients", EXPERT_REPLICAS)
        yield gradients.all_reduce("Ge", 1, "step", f"{SUMMED}: experts", 0.75, FULL_SUM)
    loads = Group("experts", REPLICAS)
    yield loads.all_reduce("l", 1, "step", "how many tokens each expert of each layer has")
