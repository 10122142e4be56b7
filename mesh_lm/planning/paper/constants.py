"""What the formulas take from compiled programs, not from a data sheet: how many bytes XLA's
kernels move beside matmuls, and which share of each kind of collective its schedule hides.

The values were fitted to compiled programs of jax 0.10.2. They are properties of this project's
programs and of XLA, so that another jax version may need another fit.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

ByRemat = tuple[float, float, float, float]
"""Values for remat none, save_names, full and save_attention."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Shares without unit, and bytes."""

    # Bytes of kernels without matmuls in a layer and microbatch, over the bytes of the residual
    # stream, of q, k, v and the attention's output, and of the MLP's hidden layer.
    residual_traffic: ByRemat = (0.172, 24.9, 0.413, 8.0)
    attention_traffic: ByRemat = (0.0221, 9.8, 7.0, 9.34)
    mlp_traffic: ByRemat = (17.1, 3.17, 2.87, 1.92)
    unrolled_traffic: float = 0.308
    """Share of them that remains where layers are unrolled: nothing is stacked."""
    gathered_traffic: float = 9.86e-23
    """Copies of the residual stream at each of its gathers and scatters over `tensor`, if a
    microbatch has several sequences: XLA gathers along the outermost dimension, and transposes."""
    accumulated_bytes: float = 17.7
    """Bytes moved for each parameter and microbatch, where there are several."""
    updated_bytes: float = 38.8
    """Bytes that the optimizer moves for each parameter."""
    logit_bytes: float = 27.6
    """Bytes moved for each logit."""
    tick_share: float = 0.53
    """The share that XLA moves of the bytes that a pipeline's tick would move for gradients and
    residuals."""
    ramp: float = 335.0
    """The smallest dimension at which a matmul reaches half of the rate."""

    # Shares of the time of collectives that go beside compute.
    hidden_tensor: ByRemat = (0.92, 1.0, 0.59, 1.0)
    hidden_tensor_zero3: float = 0.941
    """The same where layers gather their own weights, too."""
    hidden_tensor_recomputed: float = 0.25
    """The most of it where a stage recomputes the forward pass."""
    hidden_gather_nvlink: float = 1.0
    hidden_gather_network: float = 0.32
    hidden_scatter_nvlink: float = 0.309
    hidden_scatter_network: float = 6.6e-10
    hidden_zero3: float = 0.825
    """The share of gathers and scatters, where layers make their own (zero3)."""
    window: float = 0.6
    """The most of a layer's compute that its collectives go beside; all of it with zero3."""
    hidden_sums: float = 0.148
    """The share of the sums over `data` at the end of a step."""
    exposed_tables: float = 0.826
    """The share of the collectives of embedding and head over `fsdp` that is waited for."""
    exposed_tables_zero3: float = 0.226
    """The share of the sums over `data` that zero3 makes of them once a step."""


FITTED = Constants()
"""The values that predict the steps of the programs of benchmarks/best_layouts.py within 3 % in the
mean, and 17 % at most."""


class FormulaError(NamedTuple):
    """How far the formulas were off compiled programs of which they knew nothing, as shares."""

    step_mean: float
    step_max: float
    peak_mean: float
    peak_max: float


HELD_OUT = FormulaError(step_mean=0.10, step_max=0.27, peak_mean=0.12, peak_max=0.82)
"""Errors of 74 programs without stages, rounded: benchmarks/results/fit_formulas_2026-11-28. Those
of 18 with stages are smaller."""
