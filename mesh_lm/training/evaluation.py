"""The evaluations that a run makes of its own model: the loss on held-out batches, and a generated
text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.inference import Generator, Sampling
from mesh_lm.model import Batch, Sums
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.merge_stages import without_pipeline


def mean_loss(
    step: Callable[[Params, Batch], Sums], params: Params, batches: Iterable[Batch]
) -> float:
    """Returns the cross-entropy in nats per label over all batches; nan without batches. Sums stay
    on the devices until the end.
    """
    total: Sums | None = None
    for batch in batches:
        sums = step(params, batch)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    if total is None:
        return math.nan
    return float(total["loss"]) / float(total["weight"])


def sample(
    layout: ModelLayout, params: Params, tokenizer: Tokenizer, n_tokens: int, seed: int
) -> str | None:
    """Returns a text generated from an empty prompt; None if n_tokens is 0 or the model cannot
    generate.

    Donates the weights of a model with pipeline stages.
    """
    model, n_tokens = layout.bind(params), min(n_tokens, layout.config.seq_len - 1)
    if n_tokens < 1 or not (hasattr(model, "extend") or hasattr(model, "logits")):
        return None
    generator = Generator(*without_pipeline(layout, params), tokenizer, Sampling())
    return generator.complete([""], n_tokens, seed=seed, stop_at_eod=False)[0].text
