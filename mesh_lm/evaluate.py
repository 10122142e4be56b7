"""How well a model predicts text it has not seen, and text it writes itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.model import Batch, Sums


def mean_loss(step: Callable[[Params, Batch], Sums], params: Params, batches: Iterable[Batch]) -> float:
    """Cross-entropy in nats per label, over all batches; nan where there is none. Sums stay on the devices until the end."""
    total: Sums | None = None
    for batch in batches:
        sums = step(params, batch)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    if total is None:
        return math.nan
    return float(total["loss"]) / float(total["weight"])


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """A loss in the unit that does not depend on the tokenizer: bits needed for one byte of the text that the tokens encode."""
    return nats_per_token / math.log(2) * tokens / n_bytes


def sample(blueprint: Blueprint, params: Params, tokenizer: Any, n_tokens: int, seed: int) -> str | None:
    """A text that the model writes from nothing; None where n_tokens is 0 or the model gives no logits."""
    if not n_tokens or not hasattr(type(blueprint.bind(params)), "logits"):
        return None
    return tokenizer.decode(generate(blueprint, params, [tokenizer.eod], n_tokens, seed=seed)[1:])


def generate(
    blueprint: Blueprint, params: Params, prompt: list[int], n_tokens: int, *, seed: int = 0, temperature: float = 0.8, top_k: int = 50
) -> list[int]:
    """Continues a prompt (token ids, at least one) by sampling; at most the model's seq_len - len(prompt) tokens.

    Every step runs the whole sequence through the model: right and simple, for the sample at the end of a run.
    """
    shard, last = blueprint.shard, min(len(prompt) + n_tokens, blueprint.config.seq_len)
    rows, parts = (shard.ways(shard.cut(axis)) for axis in ("batch", "seq_resid"))
    tokens = jnp.zeros((rows, -(-last // parts) * parts), jnp.int32).at[:, : len(prompt)].set(jnp.asarray(prompt, jnp.int32))

    @partial(jax.jit, static_argnames=("first", "last"), out_shardings=jax.NamedSharding(shard.mesh, jax.P()))
    def run(params: Params, tokens: jax.Array, first: int, last: int) -> jax.Array:
        def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
            logits = blueprint.bind(params).logits({"tokens": tokens})[0, i - 1] / temperature
            floor = lax.top_k(logits, min(top_k, logits.size))[0][-1]
            chosen = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), i), jnp.where(logits < floor, -jnp.inf, logits))
            return tokens.at[:, i].set(chosen.astype(jnp.int32))

        return lax.fori_loop(first, last, step, tokens)

    return np.asarray(run(params, tokens, len(prompt), last))[0, :last].tolist()
