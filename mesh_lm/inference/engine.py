"""Continues token ids: one prefill pass over the prompts, then one token of every row at a time, in
a loop on the devices.

Prompts are left-padded to end in the same slot, so that each new token of all rows goes into one
slot of the cache; attention counts offsets and windows in slots. Positions count from a row's first
token, and padding is masked.

Sizes: B rows (a multiple of the batch shards), P prompt slots, T slots in total, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_lm.errors import ConfigError
from mesh_lm.inference.sampling import Sampling
from mesh_lm.model import Batch, Generative
from mesh_lm.parallel.layout import ModelLayout, Params
from sharding_rules import Shard

_SLOTS = 64
"""Programs are compiled for multiples of this many slots."""
DecodeState = dict[str, Any]
"""tokens int32 [B, T], -1 after the end of a row; logprobs float32 [B, T]; done bool [B]; slot, the
next one to write; pads, the padding before each row, and rows, its number for the seed, int32 [B];
seed; stop_ids int32 [any]; and the model's cache."""


def without_sequence_sharding(layout: ModelLayout) -> ModelLayout:
    """Returns the layout with rules that do not shard sequences, because one token cannot be
    sharded. Parameters keep their shardings.

    Devices along an axis of context parallelism then repeat the same work.

    Raises ConfigError for a model in pipeline stages.
    """
    if layout.n_stages > 1:
        raise ConfigError(
            f"mesh.pipeline={layout.n_stages}: a model in pipeline stages cannot generate or score "
            "text; merge its stages (mesh_lm/parallel/merge_stages.py)"
        )
    rules = layout.shard.rules
    unsharded = dict.fromkeys(
        row
        for row in ("seq_resid", *rules.activations)
        if row.rpartition("/")[2] in ("seq", "seq_resid")
    )
    return ModelLayout.of(
        layout.config, Shard(rules.replace(rules.name, activations=unsharded), layout.shard.mesh)
    )


class Engine:
    """Generates token ids. Programs are compiled per number of rows and (rounded) length, so use
    one engine for all prompts.
    """

    def __init__(
        self, layout: ModelLayout, params: Params, sampling: Sampling = Sampling()
    ) -> None:
        """Raises ConfigError for a model without logits."""
        model = layout.bind(params)
        if not hasattr(model, "extend") and not hasattr(model, "logits"):
            raise ConfigError(
                f"{type(model).__name__} cannot generate: it has neither extend() nor logits(); "
                "see mesh_lm/model/contract.py"
            )
        self.layout = without_sequence_sharding(layout)
        self.params = params
        self.sampling = sampling
        self._begin = jax.jit(self._begin_rows, static_argnames="length")
        self._run: Any = None

    @property
    def seq_len(self) -> int:
        """The maximum number of tokens of a prompt and its continuation."""
        return self.layout.config.seq_len

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        rows: Sequence[int] | None = None,
        stop_ids: Sequence[int] = (),
        batch: int = 0,
    ) -> Session:
        """Returns a session that has read the prompts and chosen the first token of each.

        Args:
          prompts: token ids, at least one in each.
          seed, rows: random draws depend only on the seed, the row's number (None: 0, 1, ...) and
            the token's position in the row, not on other rows, the batch or the mesh.
          stop_ids: a row ends with the first of these that it generates.
          batch: minimum number of rows to compile for, so that batches of several sizes share a
            program.

        Raises:
          ConfigError: there is no prompt, or one is empty, has a token outside the vocabulary, or
            leaves no room for the new tokens.
        """
        self.check(prompts, max_new_tokens, seed)
        longest = max(len(prompt) for prompt in prompts)
        P = min(rounded(longest), self.seq_len - max_new_tokens)
        T = min(P + _multiple(max_new_tokens, _SLOTS), self.seq_len)
        shard = self.layout.shard
        B = _multiple(max(len(prompts), batch), shard.n_shards(shard.axes_for("batch")))

        # Prompts end in the same slot. A row that fills up the batch has one token, whatever it is.
        tokens = np.zeros((B, P), np.int32)
        pads = np.full(B, P - 1, np.int32)
        for row, prompt in enumerate(prompts):
            pads[row] = P - len(prompt)
            tokens[row, pads[row] :] = prompt
        numbers = np.zeros(B, np.int32)
        numbers[: len(prompts)] = range(len(prompts)) if rows is None else rows
        idle = np.arange(B) >= len(prompts)
        stops = np.array(list(stop_ids), np.int32)
        state = self._begin(
            self.params, tokens, pads, numbers, np.uint32(seed), stops, idle, length=T
        )
        if self._run is None:
            # The output keeps the input's shardings: otherwise XLA may move the cache, and the
            # second call would compile again.
            self._run = jax.jit(
                self._run_until,
                donate_argnums=1,
                out_shardings=jax.tree.map(lambda x: x.sharding, state),
            )
        return Session(self, state, len(prompts), P, P + max_new_tokens)

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> None:
        """Raises ConfigError as `start` does, before anything is compiled."""
        vocab_size = self.layout.config.vocab_size
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed}: a seed of generation is at least 0 and below 2^32")
        if max_new_tokens < 1:
            raise ConfigError(f"{max_new_tokens} new tokens: ask for at least 1")
        if not prompts:
            raise ConfigError("there are no prompts to continue; give at least one")
        for row, prompt in enumerate(prompts):
            if not len(prompt):
                raise ConfigError(
                    f"prompt {row} has no tokens; to start without a prompt, use the "
                    "end-of-document token"
                )
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                raise ConfigError(
                    f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}"
                    f"; the model has ids 0 to {vocab_size - 1}"
                )
            if len(prompt) >= self.seq_len:
                raise ConfigError(
                    f"prompt {row} has {len(prompt)} tokens, but model.seq_len={self.seq_len}; "
                    "shorten the prompt"
                )
            if len(prompt) + max_new_tokens > self.seq_len:
                raise ConfigError(
                    f"prompt {row} has length {len(prompt)} and {max_new_tokens} new tokens were "
                    f"requested, but model.seq_len={self.seq_len}; ask for "
                    f"{self.seq_len - len(prompt)} at most, or shorten the prompt"
                )

    # Traced.

    def _begin_rows(
        self,
        params: Params,
        tokens_BP: jax.Array,
        pads_B: jax.Array,
        rows_B: jax.Array,
        seed: jax.Array,
        stop_ids: jax.Array,
        idle_B: jax.Array,
        *,
        length: int,
    ) -> DecodeState:
        B, P = tokens_BP.shape
        model = self._model(params)
        slots = jnp.arange(P)
        batch = {
            "tokens": tokens_BP,
            "positions": jnp.maximum(slots - pads_B[:, None], 0),
            "segment_ids": (slots >= pads_B[:, None]).astype(jnp.int32),
        }
        logits, cache = model.extend(batch, model.empty_cache(B, length), 0)
        state = {
            "tokens": jnp.pad(tokens_BP, [(0, 0), (0, length - P)]),
            "logprobs": jnp.zeros((B, length), jnp.float32),
            "done": idle_B,
            "slot": jnp.int32(P),
            "pads": pads_B,
            "rows": rows_B,
            "seed": seed,
            "stop_ids": stop_ids,
        }
        return self._put(state, logits) | {"cache": cache}

    def _run_until(
        self, params: Params, state: DecodeState, until: jax.Array, ended_B: jax.Array
    ) -> DecodeState:
        """Generates up to slot `until`, or until every row has ended. Rows in `ended_B` end now."""

        def unfinished(state: DecodeState) -> jax.Array:
            return (state["slot"] < until) & ~state["done"].all()

        state = state | {"done": state["done"] | ended_B}
        return lax.while_loop(unfinished, partial(self._next, params), self._replicated(state))

    def _next(self, params: Params, state: DecodeState) -> DecodeState:
        last = state["slot"] - 1
        batch = {
            "tokens": jnp.maximum(lax.dynamic_slice_in_dim(state["tokens"], last, 1, axis=1), 0),
            "positions": (last - state["pads"])[:, None],
            "segment_ids": jnp.ones((len(state["pads"]), 1), jnp.int32),
        }
        logits, cache = self._model(params).extend(batch, state["cache"], last)
        return self._put(state, logits) | {"cache": cache}

    def _put(self, state: DecodeState, logits_BV: jax.Array) -> DecodeState:
        """Returns the state with a token chosen for the next slot."""
        shard = self.layout.shard
        slot = state["slot"]
        done = state["done"]
        spec = shard.spec("activations", ("batch",))
        # Gathers each row's logits on one device, because sampling sorts them.
        logits_BV = lax.with_sharding_constraint(
            logits_BV, jax.NamedSharding(shard.mesh, jax.P(*spec, None))
        )
        key = jax.random.key(state["seed"])

        def token_key(row: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(key, row), position)

        keys = jax.vmap(token_key)(state["rows"], slot - state["pads"])
        chosen = self.sampling.choose(logits_BV, keys)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), chosen[:, None], axis=1)
        new = {
            "tokens": lax.dynamic_update_slice_in_dim(
                state["tokens"], jnp.where(done, -1, chosen)[:, None], slot, axis=1
            ),
            "logprobs": lax.dynamic_update_slice_in_dim(state["logprobs"], logprob, slot, axis=1),
            "done": done | jnp.isin(chosen, state["stop_ids"]),
            "slot": slot + 1,
        }
        return self._replicated(state | new)

    def _replicated(self, state: DecodeState) -> DecodeState:
        """Replicates everything but the cache, so that every process can read it."""
        replicated = jax.NamedSharding(self.layout.shard.mesh, jax.P())
        return {
            name: x if name == "cache" else lax.with_sharding_constraint(x, replicated)
            for name, x in state.items()
        }

    def _model(self, params: Params) -> Generative:
        model: Any = self.layout.bind(params)
        return cast(Generative, model) if hasattr(model, "extend") else NoCacheModel(model.logits)


@dataclasses.dataclass(frozen=True)
class NoCacheModel:
    """Lets a model without a cache generate: its "cache" is the text, which the model reads again
    for every token.

    Rows are shifted to remove their padding, because such a model may ignore segment ids.
    """

    logits: Any

    def empty_cache(self, rows: int, length: int) -> Batch:
        """Returns the empty text of each row."""
        return {
            name: jnp.zeros((rows, length), jnp.int32)
            for name in ("tokens", "positions", "segment_ids")
        }

    def extend(self, batch: Batch, cache: Batch, start: int | jax.Array) -> tuple[jax.Array, Batch]:
        """Appends tokens to the text. Returns the logits [B, V] of the token after them, and the
        text.
        """
        cache = {
            name: lax.dynamic_update_slice_in_dim(x, batch[name], start, axis=1)
            for name, x in cache.items()
        }
        length = cache["tokens"].shape[1]
        ends_B = batch["positions"][:, -1]
        pads_B = start + batch["tokens"].shape[1] - 1 - ends_B
        slots_BT = jnp.arange(length) + pads_B[:, None]
        text = {
            name: jnp.take_along_axis(x, jnp.minimum(slots_BT, length - 1), axis=1)
            for name, x in cache.items()
        }
        text["segment_ids"] = jnp.where(
            jnp.arange(length) <= ends_B[:, None], text["segment_ids"], 0
        )
        logits_BTV = self.logits(
            text | {"positions": jnp.broadcast_to(jnp.arange(length), slots_BT.shape)}
        )
        return jnp.take_along_axis(logits_BTV, ends_B[:, None, None], axis=1)[:, 0], cache


class Session:
    """A batch that is being generated."""

    def __init__(
        self, engine: Engine, state: DecodeState, n_prompts: int, first: int, end: int
    ) -> None:
        """first, end: the slots of the new tokens, from `first` to `end` - 1."""
        self._engine = engine
        self._state = state
        self._n_prompts = n_prompts
        self._next_slot = first
        self._end = end
        self._ended = np.zeros(state["done"].shape, bool)
        self.done = False
        """Whether every row has ended or has all its tokens."""

    def advance(self, n: int | None = None) -> list[list[tuple[int, float]]]:
        """Returns the next n tokens of every row (None: all remaining), each with its
        log-probability before temperature, top_k and top_p.

        A row that ends has fewer; a stop id is its last token.
        """
        until = self._end if n is None else min(self._next_slot + n, self._end)
        self._state = self._engine._run(
            self._engine.params, self._state, np.int32(until), self._ended
        )
        reached = int(self._state["slot"])
        # A row chooses its first token before the loop starts.
        until = min(until, reached)
        new = np.s_[: self._n_prompts, self._next_slot : until]
        tokens = np.asarray(self._state["tokens"])[new].tolist()
        logprobs = np.asarray(self._state["logprobs"])[new].tolist()
        self._next_slot = until
        self.done = until == self._end or bool(np.asarray(self._state["done"]).all())
        rows = []
        for row_tokens, row_logprobs in zip(tokens, logprobs, strict=True):
            pairs = zip(row_tokens, row_logprobs, strict=True)
            rows.append([(token, logprob) for token, logprob in pairs if token >= 0])
        return rows

    def end(self, row: int) -> None:
        """Ends a row early."""
        self._ended[row] = True


def rounded(length: int) -> int:
    """Returns the next power of two, or multiple of _SLOTS, so that prompts of many lengths share a
    program.
    """
    if length <= _SLOTS:
        return 1 << (length - 1).bit_length()
    return _multiple(length, _SLOTS)


def _multiple(n: int, unit: int) -> int:
    """Returns the least multiple of a unit that is not below n."""
    return -(-n // unit) * unit
