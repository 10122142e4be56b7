"""Muon (Jordan et al., kellerjordan.github.io/posts/muon): the momentum of a matrix,
orthogonalised. AdamW for all other parameters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim.adamw import AdamW
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots, is_matrix

BATCHES = ("layers", "fused", "experts")
"""Logical axes that are batch dimensions: a parameter has a matrix for each index."""


def matrix_dims(name: str, leaf: ArraySpec) -> MuonDimensionNumbers | None:
    """The dimensions of the two sides of a stacked parameter's matrices: embed, and all others.
    None: it does not have matrices.
    """
    axes = [axis and axis.rpartition("/")[2] for axis in leaf.axes]
    if not (
        leaf.stacked and leaf.form == "weight" and is_matrix(name, leaf.axes) and "embed" in axes
    ):
        return None
    embed = axes.index("embed")
    other = tuple(dim for dim, axis in enumerate(axes) if dim != embed and axis not in BATCHES)
    return MuonDimensionNumbers((embed,), other) if other else None


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon, with the first moment of every parameter and the second moment of those that AdamW
    updates as slots.

    Directions of matrices have an RMS of about 0.2, as AdamW's usually have (a factor of 0.2
    sqrt(longer side); Moonlight, arXiv 2502.16982), so that AdamW's learning rate and weight decay
    suit both. beta1 and beta2 apply to AdamW only, momentum to matrices only.
    """

    config: OptimizerConfig
    elementwise: bool = False

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """A momentum for each parameter, and Adam's second moment for those that are not
        matrices.
        """
        return {
            "mu": dict(leaves),
            "nu": {name: leaf for name, leaf in leaves.items() if not matrix_dims(name, leaf)},
        }

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns the orthogonalised momentum of each matrix and Adam's direction of the rest, and
        the slots after the step.
        """
        rest = slots["nu"].keys()
        numbers = {
            name: cast(MuonDimensionNumbers, matrix_dims(name, leaf))
            for name, leaf in leaves.items()
            if name not in rest
        }
        muon = scale_by_muon(
            beta=self.config.momentum,
            eps=self.config.eps,
            weight_dimension_numbers=cast(Any, numbers),
        )
        state = cast(MuonState, muon.init({}))._replace(
            count=count, mu=cast(Any, {name: slots["mu"][name] for name in numbers})
        )
        orthogonal, after = muon.update(cast(Any, {name: grads[name] for name in numbers}), state)
        directions = {
            name: 0.2
            * math.sqrt(
                max(
                    math.prod(leaves[name].shape[dim] for dim in cast(tuple, side))
                    for side in numbers[name]
                )
            )
            * x
            for name, x in cast(Params, orthogonal).items()
        }
        others, moments = AdamW(self.config).direction(
            {name: grads[name] for name in rest},
            {"mu": {name: slots["mu"][name] for name in rest}, "nu": slots["nu"]},
            params, count=count, leaves=leaves,
        )  # fmt: skip
        mu = cast(Params, cast(MuonState, after).mu) | moments["mu"]
        return directions | others, {"mu": mu, "nu": moments["nu"]}
