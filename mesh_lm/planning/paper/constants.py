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
    residual_traffic: ByRemat = (0.351, 35.7, 0.137, 18.4)
    attention_traffic: ByRemat = (0.176, 7.75, 4.29, 11.1)
    mlp_traffic: ByRemat = (18.9, 3.0, 2.4, 1.82)
    unrolled_traffic: float = 0.162
    """Share of them that remains where layers are unrolled: nothing is stacked."""
    gathered_traffic: float = 0.0132
    """Copies of the residual stream at each of its gathers and scatters over `tensor`, if a
    microbatch has several sequences: XLA gathers along the outermost dimension, and transposes."""
    accumulated_bytes: float = 26.5
    """Bytes moved for each parameter and microbatch, where there are several."""
    updated_bytes: float = 39.9
    """Bytes that the optimizer moves for each parameter."""
    logit_bytes: float = 21.4
    """Bytes moved for each logit."""
    tick_share: float = 0.352
    """The share that XLA moves of the bytes that a pipeline's tick would move for gradients and
    residuals."""
    unrolled_memory: ByRemat = (1.31, 0.243, 0.908, 1.67)
    """Bytes in memory at the peak where layers are unrolled, for each layer and over those of the
    MLP's hidden layer: XLA runs parts of one layer beside another."""
    fragmentation_share: float = 0.046
    """What is in memory at the peak besides what the formulas count, over that: small arrays, and
    the holes of XLA's heap."""
    ramp: float = 561.0
    """The smallest dimension at which a matmul reaches half of the rate."""

    # Shares of the time of collectives that go beside compute.
    hidden_tensor: ByRemat = (0.274, 0.944, 0.0975, 0.932)
    hidden_tensor_zero3: float = 0.617
    """The same where layers gather their own weights, too."""
    hidden_tensor_recomputed: float = 0.273
    """The most of it where a stage recomputes the forward pass."""
    hidden_gather_nvlink: float = 0.954
    hidden_gather_network: float = 0.629
    hidden_scatter_nvlink: float = 0.482
    hidden_scatter_network: float = 0.013
    hidden_zero3: float = 0.901
    """The share of gathers and scatters, where layers make their own (zero3)."""
    window: float = 0.285
    """The most of a layer's compute that its collectives go beside; all of it with zero3."""
    hidden_sums: float = 0.0765
    """The share of the sums over `data` at the end of a step."""
    exposed_tables: float = 0.267
    """The share of the collectives of embedding and head over `fsdp` that is waited for."""
    exposed_tables_zero3: float = 0.248
    """The share of the sums over `data` that zero3 makes of them once a step."""


FITTED = Constants()
"""The values that predict the steps of the programs of benchmarks/best_layouts.py within 5 % in the
mean, and 24 % at most; those of random models and layouts within 9 %, and 44 % at most."""


class FormulaError(NamedTuple):
    """How far the formulas were off compiled programs of which they knew nothing, as shares."""

    step_mean: float
    step_max: float
    peak_mean: float
    peak_max: float


HELD_OUT = FormulaError(step_mean=0.13, step_max=0.50, peak_mean=0.11, peak_max=0.56)
"""Errors of 203 programs without stages, rounded: benchmarks/results/fit_formulas_2026-11-29. Those
of 94 with stages are smaller."""
