"""Expert parallelism: how tokens reach the devices that hold their experts, and how the results
come back.

The functions run on the shards of one device, inside `Shard.shard_map`. An exchange consists of
hops, outermost first (`Rules.exchange`). Each hop makes the tokens of other devices local, hands
them to the next hop, and brings the results back. After the last hop a device multiplies the rows
of its own experts. What returns is the sum of a token's results: the weight of an expert has
been applied to its hidden layer, so the backward pass needs no result, and none is sent again.

Sizes: T tokens, D embed, k active experts of a token, E experts of a device, G devices of a hop, C
tokens from one device to another in a round, R rows of a buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.errors import ConfigError
from mesh_lm.model.permutation import Rows, add_rows, copy_tokens, sort
from sharding_rules import EXTRA_ROUND
from sharding_rules.rules import TokenExchange

RECEIVED = "expert_in"
"""The checkpoint name of the tokens that the last hop has delivered. While they are saved, no
exchange is repeated in a backward pass."""


class Tokens(NamedTuple):
    """Tokens on their way to experts."""

    x: jax.Array
    """[T, D]."""
    experts: jax.Array
    """int32 [T, k]: counted from the first expert of the devices that a hop leads to. A number
    outside of theirs is an expert elsewhere."""
    weights: jax.Array
    """float32 [T, k]."""


class Mlp(Protocol):
    """The experts of this device."""

    def __call__(
        self, x_RD: jax.Array, weights_R: jax.Array, sizes_E: jax.Array, /, *, first: bool
    ) -> jax.Array:
        """Returns [R, D] of rows that are sorted by expert; 0 for rows after the last expert's.

        weights: float32 [R], of the rows. sizes: int32 [E], the rows of each expert. first: whether
        this is the first round.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Hop:
    """One step of an exchange: over these mesh axes, which form G devices."""

    axes: tuple[str, ...]
    exchange: TokenExchange
    n_devices: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange of one layer, with the sizes of its buffers."""

    hops: tuple[Hop, ...]
    n_experts: int
    """Experts of a layer, on all devices."""
    active: int
    n_tokens: int
    """Tokens of a device before the exchange."""
    factor: float
    """`ExpertsConfig.factor`."""

    @property
    def local_experts(self) -> int:
        """Experts of one device."""
        return self.n_experts // math.prod(hop.n_devices for hop in self.hops)

    def experts_behind(self, hops: Sequence[Hop]) -> int:
        """Returns the experts of all devices that these hops, the last ones, lead to."""
        return self.local_experts * math.prod(hop.n_devices for hop in hops)

    def sent_tokens(self, hop: Hop, inner: Sequence[Hop], n_tokens: int) -> int:
        """Returns C, the tokens that a padded hop sends from one device to another in a round, out
        of n_tokens: `factor` times what uniform routing sends, at most all of them.
        """
        if not self.factor:
            return n_tokens
        share = chosen_share(self.n_experts, self.active, self.experts_behind(inner))
        return min(n_tokens, _multiple(self.factor * share * n_tokens, 8))

    def buffer_rows(self, n_tokens: int) -> int:
        """Returns R, the rows that a device multiplies in a round, out of n_tokens that reached it.

        Balanced routing fills active * tokens of them: as many as a device's own tokens need.
        """
        most = n_tokens * min(self.active, self.local_experts)
        if not self.factor or not self.hops:
            return most
        return min(most, _multiple(self.factor * self.active * self.n_tokens, 64))


def chosen_share(n_experts: int, active: int, group: int) -> float:
    """Returns the share of tokens that choose at least one expert of a group, where all choices are
    equally likely: 1 - C(E - g, k) / C(E, k).
    """
    return 1 - math.comb(n_experts - group, active) / math.comb(n_experts, active)


def _multiple(size: float, unit: int) -> int:
    return -(-math.ceil(size) // unit) * unit


def exchanged(
    exchange: Exchange, hops: Sequence[Hop], tokens: Tokens, mlp: Mlp, *, first: bool = True
) -> jax.Array:
    """Returns [T, D]: of each token, the weighted sum of the results of those of its experts that
    the hops lead to.

    first: whether this is part of a first round. Only its activations have checkpoint names: a name
    inside the loop over further rounds would save those of every round, most of which are empty.
    """
    if not hops:
        return _multiplied(exchange, tokens, mlp, first=first)
    hop, *inner = hops

    def deliver(delivered: Tokens, *, first: bool) -> jax.Array:
        if first and not inner:
            delivered = Tokens(*(checkpoint_name(array, RECEIVED) for array in delivered))
        return exchanged(exchange, inner, delivered, mlp, first=first)

    behind = exchange.experts_behind(inner)
    if hop.exchange == "gather":
        return _gathered(hop, behind, tokens, partial(deliver, first=first))
    if hop.exchange == "ragged":
        return _ragged(hop, behind, tokens, partial(deliver, first=first))
    n_sent = exchange.sent_tokens(hop, inner, len(tokens.x))
    # A round has collectives over all these axes, so its devices must agree on how many there are.
    agreeing_axes = tuple(axis for hop in exchange.hops for axis in hop.axes)
    return _padded(hop, behind, n_sent, agreeing_axes, tokens, deliver, first=first)


def _gathered(
    hop: Hop, experts_behind: int, tokens: Tokens, deliver: Callable[[Tokens], jax.Array]
) -> jax.Array:
    """Each device gathers the tokens of all, computes the experts it has, and the results are
    summed and scattered.
    """
    # The tokens of all devices of the hop; the transpose of this gather is a reduce-scatter.
    gathered = Tokens(*(lax.all_gather(array, hop.axes, tiled=True) for array in tokens))
    first_expert = lax.axis_index(hop.axes) * experts_behind
    y = deliver(gathered._replace(experts=gathered.experts - first_expert))
    # Each device has a part of every token's sum, and gets back the sums of its own tokens.
    return lax.psum_scatter(y, hop.axes, tiled=True)


class _Destinations(NamedTuple):
    """Which tokens go to which device of a padded hop."""

    token: jax.Array
    """int32 [G, T + C]: the tokens of each device in order, then -1."""
    rank: jax.Array
    """int32 [T, G]: the place of each token in that order; -1: it does not go there."""

    def rows(self, begin: jax.Array | int, n_sent: int) -> Rows:
        """Returns the rows of a round, [G C]: `n_sent` tokens of each device, from `begin` on."""
        token_GC = lax.dynamic_slice_in_dim(self.token, begin, n_sent, axis=1)
        place_TG = self.rank - begin
        is_sent = (self.rank >= 0) & (place_TG >= 0) & (place_TG < n_sent)
        first_rows = jnp.arange(len(self.token), dtype=jnp.int32) * n_sent
        return Rows(token_GC.reshape(-1), jnp.where(is_sent, first_rows + place_TG, -1))


def _destinations(
    tokens: Tokens, n_devices: int, experts_behind: int, n_sent: int
) -> _Destinations:
    """Returns the destinations of tokens. A token goes to a device once, however many of its
    experts are there.
    """
    device_Tk = tokens.experts // experts_behind
    goes_TG = (device_Tk[..., None] == jnp.arange(n_devices)).any(1)
    rank_TG = jnp.where(goes_TG, jnp.cumsum(goes_TG, axis=0, dtype=jnp.int32) - 1, -1)
    n_tokens = len(goes_TG)
    capacity = n_tokens + n_sent  # a slice from any round's beginning stays inside
    # Unique places, so that the scatter of these integers is exact and in no order.
    place_TG = jnp.where(goes_TG, rank_TG, capacity)
    device_TG = jnp.broadcast_to(jnp.arange(n_devices), goes_TG.shape)
    number_TG = jnp.broadcast_to(jnp.arange(n_tokens, dtype=jnp.int32)[:, None], goes_TG.shape)
    token_GT = jnp.full((n_devices, capacity), -1, jnp.int32)
    token_GT = token_GT.at[device_TG, place_TG].set(number_TG, mode="drop")
    return _Destinations(token_GT, rank_TG)


def _padded(
    hop: Hop,
    experts_behind: int,
    n_sent: int,
    agreeing_axes: tuple[str, ...],
    tokens: Tokens,
    deliver: Callable[..., jax.Array],
    *,
    first: bool,
) -> jax.Array:
    """An all-to-all sends each device its tokens, `n_sent` from each of the others, and another one
    returns the results. Where more go somewhere, further rounds follow, and nothing is dropped.
    """
    destinations = _destinations(tokens, hop.n_devices, experts_behind, n_sent)
    # Block g of the rows goes to device g, and block g of what arrives is device g's. The transpose
    # is the same exchange.
    swap = partial(lax.all_to_all, axis_name=hop.axes, split_axis=0, concat_axis=0, tiled=True)

    def run(tokens: Tokens, begin: jax.Array | int, *, first: bool) -> jax.Array:
        rows = destinations.rows(begin, n_sent)
        # A device counts experts from its own first one.
        device_R = jnp.arange(hop.n_devices * n_sent, dtype=jnp.int32)[:, None] // n_sent
        experts_Rk = tokens.experts[jnp.maximum(rows.token, 0)] - device_R * experts_behind
        experts_Rk = jnp.where((rows.token >= 0)[:, None], experts_Rk, -1)
        sent = Tokens(copy_tokens(tokens.x, rows), experts_Rk, copy_tokens(tokens.weights, rows))
        delivered = Tokens(*map(swap, sent))
        return add_rows(swap(deliver(delivered, first=first)), rows)

    def longest() -> jax.Array:
        return lax.pmax(destinations.rank.max() + 1, agreeing_axes)

    return _in_rounds(run, tokens, n_sent, len(tokens.x), longest, first=first)


def _ragged(
    hop: Hop, experts_behind: int, tokens: Tokens, deliver: Callable[[Tokens], jax.Array]
) -> jax.Array:
    """A ragged all-to-all sends each device its tokens, as many as there are, and another one
    returns the results. Tokens arrive one device's after another's, in a buffer for all of them.
    """
    n_devices = hop.n_devices
    n_tokens, k = tokens.experts.shape
    destinations = _destinations(tokens, n_devices, experts_behind, n_sent=0)
    sent_G = destinations.rank.max(0) + 1
    # Rows are sent in the order of their devices, at most one for each device of a token.
    n_rows = n_tokens * min(k, n_devices)
    begin_G = jnp.cumsum(sent_G) - sent_G
    place_TG = jnp.where(destinations.rank >= 0, begin_G + destinations.rank, -1)
    token_TG = jnp.broadcast_to(jnp.arange(n_tokens, dtype=jnp.int32)[:, None], place_TG.shape)
    device_TG = jnp.broadcast_to(jnp.arange(n_devices, dtype=jnp.int32), place_TG.shape)
    # Unique places, so that the scatter of these integers is exact and in no order.
    row_TG = jnp.where(place_TG >= 0, place_TG, n_rows)
    token_R = jnp.full(n_rows, -1, jnp.int32).at[row_TG].set(token_TG, mode="drop")
    device_R = jnp.zeros(n_rows, jnp.int32).at[row_TG].set(device_TG, mode="drop")
    rows = Rows(token_R, place_TG)

    # All devices know how many rows each sends to each, and so where they begin on both sides.
    sent_GG = lax.all_gather(sent_G, hop.axes)
    me = lax.axis_index(hop.axes)
    begin_of_sender_GG = jnp.cumsum(sent_GG, axis=1) - sent_GG
    begin_of_receiver_GG = jnp.cumsum(sent_GG, axis=0) - sent_GG
    received_G = sent_GG[:, me]

    def send(array: jax.Array) -> jax.Array:
        buffer = jnp.zeros((n_devices * n_tokens, *array.shape[1:]), array.dtype)
        return lax.ragged_all_to_all(
            *(array, buffer, begin_G, sent_G, begin_of_receiver_GG[me], received_G),
            axis_name=hop.axes,
        )

    def send_back(array: jax.Array) -> jax.Array:
        buffer = jnp.zeros((n_rows, *array.shape[1:]), array.dtype)
        begin_here_G = begin_of_receiver_GG[:, me]
        begin_there_G = begin_of_sender_GG[:, me]
        return lax.ragged_all_to_all(
            *(array, buffer, begin_here_G, received_G, begin_there_G, sent_G),
            axis_name=hop.axes,
        )

    experts_Rk = tokens.experts[jnp.maximum(token_R, 0)] - device_R[:, None] * experts_behind
    delivered = Tokens(
        send(copy_tokens(tokens.x, rows)),
        send(experts_Rk),
        send(copy_tokens(tokens.weights, rows)),
    )
    is_used = jnp.arange(n_devices * n_tokens) < received_G.sum()
    experts = jnp.where(is_used[:, None], delivered.experts, -1)
    return add_rows(send_back(deliver(delivered._replace(experts=experts))), rows)


def require_platform(hops: Sequence[Hop], platform: str) -> None:
    """Raises ConfigError for an exchange that a platform cannot run."""
    for hop in hops:
        if hop.exchange == "ragged" and platform == "cpu":
            raise ConfigError(
                f"rules.exchange[{hop.axes[0]!r}]='ragged': XLA has no ragged all-to-all for "
                "CPUs; set it to padded or gather"
            )


def _multiplied(exchange: Exchange, tokens: Tokens, mlp: Mlp, *, first: bool) -> jax.Array:
    """Returns the results of this device's own experts, [T, D], of the tokens that it has."""
    n_tokens, k = tokens.experts.shape
    n_experts = exchange.local_experts
    n_rows = exchange.buffer_rows(n_tokens)
    is_local = (tokens.experts >= 0) & (tokens.experts < n_experts)
    order = sort(jnp.where(is_local, tokens.experts, n_experts).reshape(-1), n_experts)
    ends_E = jnp.cumsum(order.sizes)
    by_key = jnp.pad(order.by_key, (0, n_rows))  # a slice from any round's beginning stays inside

    def run(tokens: Tokens, begin: jax.Array | int, *, first: bool) -> jax.Array:
        choice_R = lax.dynamic_slice_in_dim(by_key, begin, n_rows)
        is_used = begin + jnp.arange(n_rows) < ends_E[-1]
        place_A = order.rank - begin
        has_place = (place_A >= 0) & (place_A < n_rows) & (order.rank < ends_E[-1])
        place_A = jnp.where(has_place, place_A, -1)
        of_tokens = Rows(jnp.where(is_used, choice_R // k, -1), place_A.reshape(n_tokens, k))
        of_choices = Rows(jnp.where(is_used, choice_R, -1), place_A[:, None])
        x_RD = copy_tokens(tokens.x, of_tokens)
        weights_R = copy_tokens(tokens.weights.reshape(-1, 1), of_choices)[:, 0]
        sizes_E = jnp.diff(jnp.clip(ends_E - begin, 0, n_rows), prepend=0)
        return add_rows(mlp(x_RD, weights_R, sizes_E, first=first), of_tokens)

    most = n_tokens * min(k, n_experts)
    return _in_rounds(run, tokens, n_rows, most, lambda: ends_E[-1], first=first)


def _in_rounds(
    run: Callable[..., jax.Array],
    tokens: Tokens,
    size: int,
    most: int,
    needed: Callable[[], jax.Array],
    *,
    first: bool,
) -> jax.Array:
    """Returns the sum of `run(tokens, begin, first=...)` over the rounds 0, size, 2 size, ... below
    `needed()`, which is at most `most`. Those from there on are skipped.
    """
    if size >= most:
        return run(tokens, 0, first=first)
    n_needed = needed()

    # Recomputed in the backward pass: residuals of a loop are stacked over all rounds.
    @jax.checkpoint
    def add_round(y: jax.Array, tokens: Tokens, begin: jax.Array) -> jax.Array:
        def added(y: jax.Array, tokens: Tokens) -> jax.Array:
            return y + run(tokens, begin, first=False)

        with jax.named_scope(EXTRA_ROUND):
            return lax.cond(begin < n_needed, added, _unchanged, y, tokens)

    def add_rounds(y: jax.Array, tokens: Tokens, first_begin: int) -> jax.Array:
        begins = jnp.arange(first_begin, most, size, dtype=jnp.int32)
        return lax.scan(lambda y, begin: (add_round(y, tokens, begin), None), y, begins)[0]

    if not first:
        return add_rounds(jnp.zeros_like(tokens.x), tokens, 0)

    # One conditional around the loop, beside those in it: while routing is balanced, a layer tests
    # one number, and adds no zeros for each round.
    @jax.checkpoint
    def add_further_rounds(y: jax.Array, tokens: Tokens) -> jax.Array:
        further = partial(add_rounds, first_begin=size)
        with jax.named_scope(EXTRA_ROUND):
            return lax.cond(size < n_needed, further, _unchanged, y, tokens)

    # The first round always has work, and is not in the loop, so that its activations can be saved.
    return add_further_rounds(run(tokens, 0, first=True), tokens)


def _unchanged(y: jax.Array, tokens: Tokens) -> jax.Array:
    return y
