"""What the formulas take from compiled programs, not from a data sheet: how many bytes XLA's
kernels move beside matmuls, and which share of each kind of collective its schedule hides.

The values were fitted to compiled programs of jax 0.10.2. They are properties of this project's
programs and of XLA, so that another jax version may need another fit.
"""

from __future__ import annotations

import dataclasses

ByRemat = tuple[float, float, float, float]
"""Values for remat none, save_names, full and save_attention."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Shares without unit, and bytes."""

    # Bytes of kernels without matmuls in a layer and microbatch, over the bytes of the residual
    # stream, of q, k, v and the attention's output, and of the MLP's hidden layer.
    residual_traffic: ByRemat = (0.0, 17.9, 0.0, 9.0)
    attention_traffic: ByRemat = (0.0, 18.4, 5.1, 18.4)
    mlp_traffic: ByRemat = (14.7, 3.3, 2.2, 3.0)
    unrolled_traffic: float = 0.49
    """Share of them that remains where layers are unrolled: nothing is stacked."""
    gathered_traffic: float = 2.4
    """Copies of the residual stream at each of its gathers and scatters over `tensor`, if a
    microbatch has several sequences: XLA gathers along the outermost dimension, and transposes."""
    accumulated_bytes: float = 12.0
    """Bytes moved for each parameter and microbatch, where there are several."""
    updated_bytes: float = 44.0
    """Bytes that the optimizer moves for each parameter."""
    logit_bytes: float = 30.0
    """Bytes moved for each logit."""
    tick_share: float = 0.47
    """The share that XLA moves of the bytes that a pipeline's tick would move for gradients and
    residuals."""
    ramp: float = 128.0
    """The smallest dimension at which a matmul reaches half of the rate."""

    # Shares of the time of collectives that go beside compute.
    hidden_tensor: ByRemat = (0.92, 0.92, 0.59, 0.92)
    hidden_tensor_zero3: float = 0.74
    """The same where layers gather their own weights, too."""
    hidden_tensor_recomputed: float = 0.25
    """The most of it where a stage recomputes the forward pass."""
    hidden_gather_nvlink: float = 0.93
    hidden_gather_network: float = 0.32
    hidden_scatter_nvlink: float = 0.3
    hidden_scatter_network: float = 0.0
    hidden_zero3: float = 1.0
    """The share of gathers and scatters, where layers make their own (zero3)."""
    window: float = 0.6
    """The most of a layer's compute that its collectives go beside; all of it with zero3."""
    hidden_sums: float = 0.08
    """The share of the sums over `data` at the end of a step."""
    exposed_tables: float = 0.85
    """The share of the collectives of embedding and head that is waited for, except with zero3."""
    exposed_tables_zero3: float = 0.2


FITTED = Constants()
"""The values that predict the steps of the shipped configs within 6 % in the mean, and 20 % at
most."""
