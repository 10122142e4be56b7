"""Muon (Jordan et al., kellerjordan.github.io/posts/muon): the momentum of a matrix,
orthogonalised. AdamW for all other parameters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax

from mesh_lm.fields import option
from mesh_lm.optim.adamw import AdamW
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots, is_matrix

if TYPE_CHECKING:
    from optax.contrib import MuonDimensionNumbers, MuonState

BATCHES = ("layers", "fused", "experts")
"""Logical axes that are batch dimensions: a parameter has a matrix for each index."""


def matrix_dims(name: str, leaf: ArraySpec) -> MuonDimensionNumbers | None:
    """Returns the dimensions of the two sides of a stacked parameter's matrices: embed, and all
    others. None: it does not have matrices.
    """
    if not leaf.stacked or leaf.form != "weight" or not is_matrix(name, leaf.axes):
        return None
    axes = [axis and axis.rpartition("/")[2] for axis in leaf.axes]
    if "embed" not in axes:
        return None
    from optax.contrib import MuonDimensionNumbers  # here, so that configs load without optax

    embed = axes.index("embed")
    other = tuple(dim for dim, axis in enumerate(axes) if dim != embed and axis not in BATCHES)
    return MuonDimensionNumbers((embed,), other) if other else None


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon, with the first moment of every parameter and the second moment of those that AdamW
    updates as slots.

    Directions of matrices have an RMS of about 0.2, as AdamW's usually have (a factor of 0.2
    sqrt(longer side); Moonlight, arXiv 2502.16982), so that AdamW's learning rate and weight decay
    suit both.
    """

    elementwise: ClassVar[bool] = False
    momentum: float = option(0.95, least=0, below=1)
    """Decay rate of the momentum of matrices."""
    beta1: float = option(0.9, least=0, below=1)
    """AdamW's, for the parameters that are not matrices."""
    beta2: float = option(0.95, least=0, below=1)
    """AdamW's, for the parameters that are not matrices."""
    eps: float = option(1e-8, above=0, below=math.inf, expert=True)
    """Added to the denominators of both."""

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns a momentum for each parameter, and Adam's second moment for parameters that are
        not matrices.
        """
        other_leaves = {name: leaf for name, leaf in leaves.items() if not matrix_dims(name, leaf)}
        return {"mu": dict(leaves), "nu": other_leaves}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns the orthogonalised momentum of each matrix and Adam's direction of the rest, and
        the slots after the step.
        """
        from optax.contrib import scale_by_muon  # here, so that configs load without optax

        other_names = slots["nu"].keys()
        dims: dict[str, MuonDimensionNumbers] = {}
        for name, leaf in leaves.items():
            if name not in other_names:
                dims[name] = cast("MuonDimensionNumbers", matrix_dims(name, leaf))
        rule = scale_by_muon(
            beta=self.momentum,
            eps=self.eps,
            weight_dimension_numbers=cast(Any, dims),
        )
        momentum = {name: slots["mu"][name] for name in dims}
        state = cast("MuonState", rule.init({}))._replace(count=count, mu=cast(Any, momentum))
        matrix_grads = {name: grads[name] for name in dims}
        orthogonal, new_state = rule.update(cast(Any, matrix_grads), state)
        directions: Params = {}
        for name, x in cast(Params, orthogonal).items():
            sides = [
                math.prod(leaves[name].shape[dim] for dim in cast(tuple, side))
                for side in dims[name]
            ]
            directions[name] = 0.2 * math.sqrt(max(sides)) * x

        other_slots = {"mu": {name: slots["mu"][name] for name in other_names}, "nu": slots["nu"]}
        other_grads = {name: grads[name] for name in other_names}
        adamw = AdamW(self.beta1, self.beta2, self.eps)
        other_directions, moments = adamw.direction(
            other_grads, other_slots, params, count=count, leaves=leaves
        )
        new_momentum = cast(Params, cast("MuonState", new_state).mu) | moments["mu"]
        return directions | other_directions, {"mu": new_momentum, "nu": moments["nu"]}
