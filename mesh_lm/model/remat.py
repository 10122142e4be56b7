"""What the backward pass of a layer keeps of its forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from mesh_lm.schedules.segments import Remat

SAVED_NAMES = ("q", "k", "v", "attention_out", "attention_lse", "mid_residual", "mlp_up")
"""What remat=save_names keeps of a layer, and remat=offload moves to the host: the results of matmuls and of the attention kernel,
everything that is expensive to recompute; norms and the nonlinearity are not kept."""


def remat(policy: Remat) -> Callable[[Callable], Callable]:
    """A transformation of a layer's function that recomputes in its backward pass by this policy (see `DecoderConfig.remat`)."""
    policies = jax.checkpoint_policies
    if policy == "none":
        return lambda f: f
    if policy == "full":
        return partial(jax.checkpoint, prevent_cse=False)
    if policy == "save_names":
        named = policies.save_only_these_names(*SAVED_NAMES)

        def keep(primitive: Any, *args: Any, **params: Any) -> bool:
            # cuDNN's residuals have no names of ours.
            return primitive.name.startswith("dot_product_attention_fwd") or named(primitive, *args, **params)

        return partial(jax.checkpoint, prevent_cse=False, policy=keep)
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(SAVED_NAMES), offload_src="device", offload_dst="pinned_host"
    )
    return partial(jax.checkpoint, prevent_cse=False, policy=offload)
