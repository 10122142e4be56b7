"""Rematerialisation: which activations of a layer are saved for its backward pass, and which are
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax

from mesh_lm.model.router import ROUTING
from mesh_lm.schedules.segments import Remat

ATTENTION_NAMES = ("q", "k", "v", "attention_out", "attention_lse", "mid_residual")
"""The activations of a layer that remat=save_attention saves: the MLP's matmuls but its last are
recomputed, which have the widest results."""
SAVED_NAMES = (*ATTENTION_NAMES, "mlp_up", "expert_in", "expert_up")
"""The activations of a layer that remat=save_names saves, and that remat=offload moves to the host:
the results of matmuls, of the attention kernel and of exchanges of tokens, which are expensive to
recompute. Norms and the nonlinearity are recomputed."""
CHOICES = (ROUTING,)
"""What every policy saves: the experts that a router has chosen. A choice that the backward pass
made again could be another one."""


def remat(policy: Remat, unrolled: bool = False) -> Callable[[Callable], Callable]:
    """Returns a function transformation: the backward pass of the result recomputes by this policy
    (see `DecoderConfig.remat`).

    unrolled: whether the forward pass is in one computation with its backward, instead of a loop of
    its own: without barriers XLA would find the recomputation equal to it, and save the activations
    after all.
    """
    checkpoint = partial(jax.checkpoint, prevent_cse=unrolled)
    if policy == "none":
        return lambda f: f
    if policy == "full":
        return partial(checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*CHOICES))
    if policy == "save_names":
        return partial(checkpoint, policy=_saves((*SAVED_NAMES, *CHOICES)))
    if policy == "save_attention":
        return partial(checkpoint, policy=_saves((*ATTENTION_NAMES, *CHOICES)))
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(CHOICES),
        names_which_can_be_offloaded=list(SAVED_NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return partial(checkpoint, policy=offload)


def _saves(names: Collection[str]) -> Callable[..., Any]:
    """Returns the policy that saves the activations of these names."""
    is_named = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive: Any, *args: Any, **params: Any) -> bool:
        # The residuals of cuDNN have no checkpoint names.
        is_cudnn = primitive.name.startswith("dot_product_attention_fwd")
        return is_cudnn or is_named(primitive, *args, **params)

    return policy
