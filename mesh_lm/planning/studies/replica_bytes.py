"""What data parallelism sends: the bytes of one step on one GPU under each preset, by the closed
forms.

Nothing is compiled. Compiled programs are held to these forms (docs/closed_forms.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mesh_lm.errors import ConfigError
from mesh_lm.planning.closed_forms.config import models_without_form
from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import Decoder, NoFormError, Strategy
from mesh_lm.planning.closed_forms.terms import Term, total

NODE = 8
"""GPUs of a node, between which NVLink goes."""


class Replicas(NamedTuple):
    """A way to train on replicas of a model."""

    label: str
    rules: str
    """As --rules takes it."""
    axis: str = "data"
    """The mesh axis of the replicas, or of their nodes."""
    reduction: str = "auto"
    """The type in which gradients are summed."""


REPLICAS = (
    Replicas("DDP", "ddp"),
    Replicas("DDP, bf16 sums", "ddp+reduce_bfloat16", reduction="bfloat16"),
    Replicas("DDP, int8 sums", "ddp+reduce_int8", reduction="int8"),
    Replicas("DDP in two levels", "by_node"),
    Replicas("ZeRO-1", "zero1"),
    Replicas("ZeRO-2", "zero2"),
    Replicas("distributed", "distributed"),
    Replicas("distributed, int8 sums", "distributed+reduce_int8", reduction="int8"),
    Replicas("ZeRO-3", "zero3"),
    Replicas("FSDP", "fsdp", "fsdp"),
)


EXPERT_REPLICAS = (
    Replicas("DDP", "ddp"),
    Replicas("distributed", "distributed"),
    Replicas("ZeRO-3", "zero3"),
    Replicas("EP, gathered", "experts_gather", "expert"),
    Replicas("EP, padded", "experts_padded", "expert"),
    Replicas("EP, padded + distributed", "distributed+experts_padded", "expert"),
    Replicas("EP, padded + ZeRO-3", "zero3+experts_padded", "expert"),
)
"""The same for a mixture of experts. EP: the experts of a layer are divided among the GPUs of a
node."""


class BytesRow(NamedTuple):
    """What one GPU sends in a step. Bytes, as a ring sends them."""

    strategy: str
    rules: str
    gpus: int
    status: str
    """Empty, or why the strategy does not serve this number of GPUs; then the bytes are 0."""
    sent: float
    inside: float
    """The part of `sent` in groups of one node."""
    between: float
    """The part of `sent` in groups that span several nodes."""
    least: float
    """What the strategy could not do without."""
    per_parameter: float
    """`sent` over the parameters of the model."""


def replica_bytes(
    config: Any, counts: Sequence[int], microbatches: int = 1, node: int = NODE
) -> list[BytesRow]:
    """Returns a row for each strategy and number of GPUs, in the order of `REPLICAS`, or of
    `EXPERT_REPLICAS` for a mixture of experts.

    Args:
      config: whose model it is (a `TrainConfig`); its mesh and its rules do not count.
      counts: numbers of GPUs.
      microbatches: of a step, with one sequence on each GPU. Strategies whose layers gather their
        weights do so in each, and experts exchange the tokens of each.
      node: GPUs of a node.

    Raises ConfigError for a model without closed forms.
    """
    problems = list(models_without_form(config))
    if problems:
        raise ConfigError(f"there is no closed form for this model: {' and '.join(problems)}")
    model = Decoder.of(config.model)
    rows = []
    for replicas in EXPERT_REPLICAS if model.experts else REPLICAS:
        for gpus in counts:
            rows.append(_row(replicas, model, config.model.n_params(), gpus, microbatches, node))
    return rows


def _row(
    replicas: Replicas, model: Decoder, n_params: int, gpus: int, microbatches: int, node: int
) -> BytesRow:
    status = _why_not(replicas, model, gpus, node)
    if status:
        return BytesRow(replicas.label, replicas.rules, gpus, status, 0, 0, 0, 0, 0)
    try:
        # Only what experts exchange depends on the sequences of a microbatch.
        terms = expected(model, _strategy(replicas, model, gpus, node), 1, microbatches)
    except NoFormError as error:
        return BytesRow(replicas.label, replicas.rules, gpus, str(error), 0, 0, 0, 0, 0)
    sent = total(terms)
    inside = sum(term.wire_bytes for term in terms if _is_inside(term, gpus, node))
    least = total(terms, field="least_wire_bytes")
    return BytesRow(
        replicas.label,
        replicas.rules,
        gpus,
        "",
        sent,
        inside,
        sent - inside,
        least,
        sent / n_params,
    )


def _why_not(replicas: Replicas, model: Decoder, gpus: int, node: int) -> str:
    """Returns why a strategy does not serve a number of GPUs; empty if it does."""
    if replicas.axis == "expert" and gpus % _expert_ways(model, gpus, node):
        return f"{gpus:,} GPUs do not divide by {_expert_ways(model, gpus, node)}"
    if replicas.rules == "by_node" and (gpus <= node or gpus % node):
        return f"two levels need several nodes of {node} GPUs"
    if replicas.rules in ("zero1", "zero2", "fsdp") and model.d_model % gpus:
        return f"d_model={model.d_model} does not divide by {gpus}"
    return ""


def _expert_ways(model: Decoder, gpus: int, node: int) -> int:
    """Returns the GPUs among which the experts of a layer are divided: of a node, at most as many
    as there are experts.
    """
    n_experts = model.experts.number if model.experts else 1
    return math.gcd(n_experts, min(node, gpus))


def _strategy(replicas: Replicas, model: Decoder, gpus: int, node: int) -> Strategy:
    if replicas.axis == "expert":
        expert = _expert_ways(model, gpus, node)
        return Strategy(replicas.rules, data=gpus // expert, expert=expert)
    preset = replicas.rules.partition("+")[0]
    if preset == "by_node":
        return Strategy(preset, data=gpus // node, node=node)
    if replicas.axis == "fsdp":
        return Strategy(preset, fsdp=gpus)
    return Strategy(preset, data=gpus, reduction=replicas.reduction)  # pyright: ignore


def _is_inside(term: Term, gpus: int, node: int) -> bool:
    """Whether the group of a collective is in one node."""
    return gpus <= node or term.axes in (("node",), ("expert",))
