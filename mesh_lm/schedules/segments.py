"""A model's layers as data: its segments, each a run of layers of one kind, and their costs.
Imports no jax.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

Remat = Literal["none", "full", "save_attention", "save_names", "offload"]
LIGHTER: dict[Remat, Remat] = {
    "full": "save_names",
    "save_attention": "save_names",
    "save_names": "none",
}
"""For each policy, the one that recomputes less, and saves more."""


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of a segment, from `begin` to before `end`."""

    begin: int
    end: int
    remat: Remat
    keep: bool = False
    """Whether the layers keep the weights that they gather until their backward passes."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of layers of one kind, which one scan executes.

    The model has it as the attribute `name`: a module for one layer, whose parameters have the
    segment's layers as leading dimension (logical axis "layers"). The name is also the scope of its
    parameters and of its sharding rules ("moe/mlp").
    """

    name: str
    n_layers: int
    period: int = 1
    """The number of layers in a repeating pattern, such as one of windows. A pipeline stage holds
    complete patterns."""
    remat: Remat = "none"
    """What the backward pass of a layer recomputes (`mesh_lm.parallel.remat`)."""
    cost: float = 1.0
    """Matmul FLOPs of one token in one layer. Any other unit works: only ratios matter."""
    unroll: bool = False
    """Whether the loop over the layers is unrolled."""
    remat_layers: int | None = None
    """The number of first layers to which `remat` applies; the others have the policy that is
    `LIGHTER`. None: all."""
    kept_layers: int = 0
    """The number of last layers that keep the weights they gather (`mesh_lm.parallel.zero3`)
    until their backward passes."""
    batch_halves: bool = False
    """Whether a layer runs on two halves of its sequences (`mesh_lm.parallel.halves`)."""

    def runs(self) -> list[LayerRun]:
        """Returns the layers, in order, as runs that have one policy."""
        lighter_begin = self.n_layers if self.remat_layers is None else self.remat_layers
        keep_begin = self.n_layers - self.kept_layers
        bounds = sorted({0, lighter_begin, keep_begin, self.n_layers})
        runs = []
        for begin, end in itertools.pairwise(bounds):
            remat = self.remat
            if begin >= lighter_begin:
                remat = LIGHTER.get(remat, remat)
            runs.append(LayerRun(begin, end, remat, keep=begin >= keep_begin))
        return runs


@dataclasses.dataclass(frozen=True)
class Stack:
    """A whole model: embed -> segments -> loss.

    A pipeline divides its layers among the stages, at any boundary between two layers.
    """

    segments: tuple[Segment, ...] = ()
    embed: float = 0.0
    """Cost of the embedding, in the unit of the segments."""
    head: float = 0.0
    """Cost of the head and the loss."""

    @property
    def n_layers(self) -> int:
        """The number of layers of all segments."""
        return sum(segment.n_layers for segment in self.segments)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the segments, in order."""
        return tuple(segment.name for segment in self.segments)

    def start(self, name: str) -> int:
        """Returns the number of a segment's first layer in the whole model."""
        return sum(segment.n_layers for segment in self.segments[: self.names.index(name)])

    def problems(self) -> list[str]:
        """Returns a sentence for each fault of the stack."""
        problems = []
        for segment in self.segments:
            if segment.n_layers < 1:
                problems.append(
                    f"model.segments: {segment.name!r} has {segment.n_layers} layers; it needs at "
                    "least 1"
                )
        for segment in self.segments:
            if segment.period < 1:
                problems.append(
                    f"model.segments: {segment.name!r} has a period of {segment.period} layers; it "
                    "needs at least 1"
                )
            elif segment.n_layers % segment.period:
                problems.append(
                    f"model.segments: {segment.name!r} has {segment.n_layers} layers, not a "
                    f"multiple of its period of {segment.period}"
                )
        for name in dict.fromkeys(self.names):
            if not name.isidentifier():
                problems.append(
                    f"model.segments: {name!r} is not a name that a module's attribute can have"
                )
            elif self.names.count(name) > 1:
                problems.append(
                    f"model.segments: {self.names.count(name)} segments are called {name!r}; names "
                    f"are unique, as in '{name}_0' and '{name}_1'"
                )
        return problems

    def with_recomputation(self, virtual: int, repeats: bool) -> Stack:
        """Returns the stack with the costs of recomputed forward passes on `virtual` stages.

        repeats: whether a backward slot recomputes the forward pass, a third of a layer's FLOPs.
        Then the last virtual stage has no forward slot, so its head costs only what exceeds that
        forward pass.
        """
        if not repeats:
            return self
        layers_cost = sum(segment.n_layers * segment.cost for segment in self.segments)
        segments = tuple(
            dataclasses.replace(segment, cost=segment.cost + segment.cost / 3)
            for segment in self.segments
        )
        return Stack(segments, self.embed, max(0.0, self.head - layers_cost / virtual / 3))
