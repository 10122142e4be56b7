"""The experts of a layer, and how its tokens choose among them. It has a module of its own, so that
reading a config does not import JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from mesh_lm.fields import bound_problems, expert, option


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts, in the layers of kind moe."""

    number: int = option(8, least=1)
    """Experts of a layer."""
    active: int = option(2, least=1)
    """Experts of each token (top-k)."""
    d_ff: int = option(0, least=0)
    """Width of an expert; 0: that of the MLP."""
    shared: int = expert(0, least=0)
    """Width of the shared expert, which sees every token (DeepSeek-V3, arXiv 2412.19437); 0:
    none."""
    score: Literal["softmax", "sigmoid"] = expert("softmax")
    """How the router turns its logits into scores."""
    normalised: bool = expert(True)
    """Whether the weights of a token's experts sum to 1."""
    scale: float = option(1.0, least=0, below=math.inf, expert=True)
    """Factor of those weights."""
    groups: int = expert(1, least=1)
    """Groups into which the experts are divided (group-limited routing)."""
    active_groups: int = expert(1, least=1)
    """Groups whose experts a token may choose: those with the highest sums of their two best
    scores."""
    bias: bool = expert(False)
    """Whether the router adds a bias to each expert's score when it chooses, which balances the
    experts without a loss (arXiv 2408.15664). It is saved with the weights."""
    bias_rate: float = option(0.001, least=0, below=math.inf, expert=True)
    """By how much a step changes the bias: up for an expert with fewer tokens than the mean, down
    for one with more. 0: it stays as it is."""
    balance_loss: float = option(0.0, least=0, below=math.inf, expert=True)
    """Weight of the balance loss of each sequence: number / active times the sum over experts of
    (share of the sequence's choices) x (mean score) (DeepSeek-V3, arXiv 2412.19437)."""
    z_loss: float = option(0.0, least=0, below=math.inf, expert=True)
    """Weight of the router's z-loss, log(Z)^2, which keeps its logits near 0 (ST-MoE, arXiv
    2202.08906)."""
    factor: float = option(1.25, least=0, below=math.inf, expert=True)
    """Size of the buffers that receive tokens, in units of what balanced routing fills. What does
    not fit follows in further rounds. 0: buffers for the worst routing, and one round."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each wrong value, and for each contradiction between fields."""
        problems = list(bound_problems("model.experts", self))
        if self.score not in ("softmax", "sigmoid"):
            problems.append(f"model.experts.score={self.score!r} must be softmax or sigmoid")
        yield from problems
        if problems:
            return
        if self.active > self.number:
            yield (
                f"model.experts.active={self.active} is more than "
                f"model.experts.number={self.number}, the experts that there are"
            )
            return
        if 0 < self.factor < 1:
            yield (
                f"model.experts.factor={self.factor} would not hold the tokens of balanced "
                "routing; set it to 1 or more, or to 0 for the worst routing"
            )
        if self.number % self.groups:
            yield (
                f"model.experts.number={self.number} is not divisible by "
                f"model.experts.groups={self.groups}"
            )
            return
        group_size = self.number // self.groups
        if self.active_groups > self.groups:
            yield (
                f"model.experts.active_groups={self.active_groups} is more than "
                f"model.experts.groups={self.groups}"
            )
        elif self.active > self.active_groups * group_size:
            yield (
                f"model.experts.active={self.active} is more than the experts of "
                f"model.experts.active_groups={self.active_groups} groups, which have "
                f"{group_size} each"
            )
