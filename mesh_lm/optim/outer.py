"""The outer step of DiLoCo (Douillard et al., arXiv 2311.08105): SGD with Nesterov momentum on the
mean change of the islands' weights.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import optax

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim.contract import Params


def outer_update(
    config: OptimizerConfig, anchor: Params, momentum: Params, mean: Params
) -> tuple[Params, Params]:
    """Returns (the new anchor, the new momentum), from which all islands continue.

    anchor: the weights from which all islands started. mean: the mean of the islands' weights after
    their steps. The outer gradient is anchor - mean, and the anchor moves by minus the learning
    rate times (gradient + decay * momentum), as PyTorch's Nesterov SGD does.
    """
    gradient = jax.tree.map(lambda a, b: a - b, anchor, mean)
    rule = optax.trace(config.outer_momentum, nesterov=True)
    moves, state = rule.update(cast(Any, gradient), optax.TraceState(cast(Any, momentum)))
    new = jax.tree.map(lambda a, move: a - config.outer_learning_rate * move, anchor, moves)
    return new, cast(Params, cast(optax.TraceState, state).trace)
