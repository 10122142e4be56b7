"""The router of a mixture of experts: which experts a token is sent to, and with which weights.

Sizes: T tokens, B sequences, E experts, k active experts of a token, G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.model.experts_config import ExpertsConfig

ROUTING = "routing"
"""The checkpoint name of the experts that tokens chose."""


class Routing(NamedTuple):
    """The choice of each token."""

    experts: jax.Array
    """int32 [T, k]: different experts, best first."""
    weights: jax.Array
    """float32 [T, k]: the factors of their outputs."""
    scores: jax.Array
    """float32 [T, E]: the scores of all experts."""


def route(logits_TE: jax.Array, bias_E: jax.Array | None, config: ExpertsConfig) -> Routing:
    """Returns the experts that each token chooses by its logits, float32 [T, E].

    bias: float32 [E], added to the scores for the choice alone; the weights are those of the scores
    without it (arXiv 2408.15664).
    """
    if config.score == "softmax":
        scores_TE = jax.nn.softmax(logits_TE)
    else:
        scores_TE = jax.nn.sigmoid(logits_TE)
    # The choice has no gradient; the weights have one, through the scores.
    rank_TE = lax.stop_gradient(scores_TE if bias_E is None else scores_TE + bias_E)
    if config.groups > 1:
        rank_TE = _within_best_groups(rank_TE, config)
    # Every policy of rematerialisation saves the choice: a backward pass that computes the logits
    # again, in another order of sums, could choose otherwise, and mix rows of different tokens.
    experts_Tk = checkpoint_name(lax.top_k(rank_TE, config.active)[1], ROUTING)
    weights_Tk = jnp.take_along_axis(scores_TE, experts_Tk, axis=1)
    if config.normalised:
        # The small number keeps a token finite whose sigmoid scores all underflow.
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdims=True) + 1e-20)
    return Routing(experts_Tk, config.scale * weights_Tk, scores_TE)


def _within_best_groups(rank_TE: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Returns the ranks with -inf for experts outside of a token's best groups (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2: a group's score is the sum of its two best).
    """
    rank_TGe = rank_TE.reshape(len(rank_TE), config.groups, -1)
    n_best = min(2, rank_TGe.shape[-1])
    group_scores_TG = lax.top_k(rank_TGe, n_best)[0].sum(-1)
    best_groups = lax.top_k(group_scores_TG, config.active_groups)[1]
    allowed_TG = jax.nn.one_hot(best_groups, config.groups, dtype=bool).any(1)
    return jnp.where(allowed_TG[..., None], rank_TGe, -jnp.inf).reshape(rank_TE.shape)


def balance_loss(choices_BE: jax.Array, mean_score_BE: jax.Array, active: int) -> jax.Array:
    """Returns E / k sum_e f_e P_e of each sequence, float32 [B]; 1 for balanced routing with scores
    that sum to 1 (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

    choices: how many of a sequence's tokens chose each expert, divided by its tokens. mean_score:
    of the scores, each token's divided by their sum.
    """
    n_experts = choices_BE.shape[1]
    frequency_BE = lax.stop_gradient(choices_BE)
    return n_experts / active * (frequency_BE * mean_score_BE).sum(-1)
