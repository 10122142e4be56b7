"""What expert parallelism sends, in closed form: tokens to experts, or, under other rules, the
weights of experts to tokens.

The forms count the first round of an exchange (`mesh_lm.model.exchange`), which is all of it while
routing is balanced. Bytes are those that a device sends in a layer and microbatch, forward and
backward, with activations saved that the exchange has delivered (remat=save_names).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.model.exchange import Exchange, chosen_share
from mesh_lm.training.expert_kernels import exchange_of
from sharding_rules import setting
from sharding_rules.lab.summary import size

_INT32 = 4
_FLOAT32 = 4
_BYTES = {"bfloat16": 2, "float32": 4}
"""Type -> bytes of an element of activations and of weights in use."""


def token_bytes(exchange: Exchange, d_model: int, dtype: str = "bfloat16") -> float:
    """Returns the bytes for moving tokens: each hop sends rows to the experts, and sums back, and
    the backward pass does the same for gradients. Beside a row go the numbers and weights of its
    experts, and back the gradients of these weights.
    """
    total = 0.0
    n_tokens = exchange.n_tokens
    row = 4 * d_model * _BYTES[dtype] + exchange.active * (_INT32 + 2 * _FLOAT32)
    for number, hop in enumerate(exchange.hops):
        inner = exchange.hops[number + 1 :]
        rows = float(n_tokens)
        received = n_tokens
        if hop.exchange == "padded":
            received = exchange.sent_tokens(hop, inner, n_tokens)
            rows = float(received)
        elif hop.exchange == "ragged":
            group = exchange.experts_behind(inner)
            rows *= chosen_share(exchange.n_experts, exchange.active, group)
        total += (hop.n_devices - 1) * rows * row
        n_tokens = hop.n_devices * received
    return total


def balanced_token_bytes(exchange: Exchange, d_model: int, dtype: str = "bfloat16") -> float:
    """Returns the least that all-to-alls of one row for each token and expert send in one layer,
    where routing is balanced: k T rows, of which (G - 1) / G leave the device, four times. Several
    experts of a token on one device share a row, so that an exchange may send less.
    """
    n_devices = math.prod(hop.n_devices for hop in exchange.hops)
    n_rows = exchange.active * exchange.n_tokens * (n_devices - 1) / n_devices
    return 4 * n_rows * d_model * _BYTES[dtype]


def weight_bytes(exchange: Exchange, expert_weights: int, dtype: str = "bfloat16") -> float:
    """Returns the bytes for moving weights instead (FSDP of experts over the same devices): all
    matrices of a layer's experts are gathered in the forward and in the backward pass, and their
    gradients reduce-scattered.

    expert_weights: the weights of one expert.
    """
    n_devices = math.prod(hop.n_devices for hop in exchange.hops)
    gathered = exchange.n_experts * expert_weights * _BYTES[dtype]
    return 3 * gathered * (n_devices - 1) / n_devices


def report_facts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields a line for the report of each segment with experts: the exchange, what it sends, and
    what weights would.
    """
    model = config.model
    if not isinstance(model, DecoderConfig):
        return
    segments = model.expert_segments()
    matrices = 3 if model.activation == "swiglu" else 2
    for segment in segments:
        exchange = exchange_of(config, model, segment.name)
        name = "experts" if len(segments) == 1 else f"experts of {segment.name}"
        chosen = f"{model.experts.active} of {model.experts.number}"
        if not exchange.hops:
            yield name, f"{chosen}, all on each device"
            continue
        sizes = config.mesh.sizes()
        words = [
            f"{hop.exchange} over {' x '.join(setting(axis, sizes[axis]) for axis in hop.axes)}"
            for hop in exchange.hops
        ]
        dtype = model.within(segment).dtype
        exchanges = 2 if model.batch_halves else 1
        tokens = exchanges * token_bytes(exchange, model.d_model, dtype)
        weights = weight_bytes(exchange, matrices * model.d_model * model.d_expert, dtype)
        cheaper = "tokens are" if tokens <= weights else "weights (fsdp) would be"
        yield (
            name,
            f"{chosen}, {exchange.local_experts} on each device, {', then '.join(words)}; a layer "
            f"sends {size(tokens)} of tokens in a microbatch, and would send {size(weights)} of "
            f"weights: {cheaper} cheaper",
        )
