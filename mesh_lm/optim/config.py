"""The section `optimizer` of a config, what all update rules share, and the section `diloco`."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from mesh_lm.fields import option
from mesh_lm.optim.adamw import AdamW
from mesh_lm.optim.contract import Rule


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule, its learning-rate schedule, global-norm clipping, and decoupled weight
    decay.
    """

    rule: Rule = AdamW()
    """adamw, adamw8, muon, lion, adafactor, or module:class for your own (docs/optimizers.md). In
    Python the rule itself, such as Muon(momentum=0.9), with its hyperparameters."""
    learning_rate: float = option(3e-4, least=0, below=math.inf)
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape of the schedule after the warm-up. wsd: constant, then linear decay over the last
    `decay_fraction` of the run."""
    warmup_steps: int = option(100, least=0)
    """Steps over which the learning rate rises linearly from 0. A run that is shorter ends below
    the peak."""
    final_fraction: float = option(0.1, least=0, most=1)
    """Final learning rate, as a fraction of the peak."""
    decay_fraction: float = option(0.2, least=0, most=1, expert=True)
    """Fraction of the run over which wsd decays."""
    weight_decay: float = option(0.1, least=0, below=math.inf)
    """Decoupled weight decay of matrices. Biases, norms and other per-layer vectors do not
    decay."""
    clip_norm: float = option(1.0, least=0, below=math.inf)
    """Clip gradients to this global L2 norm; 0: off."""
    offload: tuple[str, ...] = ()
    """Parts of the state that the hosts' pinned memory keeps, such as mu,nu (docs/memory.md). They
    are slots of the rule, and master, the fp32 weights of rules with flat vectors; they are updated
    a layer at a time."""


@dataclasses.dataclass(frozen=True)
class DilocoConfig:
    """The outer optimizer of islands (mesh.island): SGD with Nesterov momentum on the mean change
    of their weights (DiLoCo, arXiv 2311.08105; docs/optimizers.md).
    """

    outer_steps: int = option(0, least=0)
    """Steps that each island trains apart before the islands average their weights; 0: off."""
    outer_learning_rate: float = option(0.7, above=0, below=math.inf, expert=True)
    """Learning rate of the outer step, which moves the weights by the mean change of the islands; 1
    with no momentum: to their mean."""
    outer_momentum: float = option(0.9, least=0, below=1, expert=True)
    """Nesterov momentum of the outer step."""
