"""Contradictions between a config's rules, its mesh, its model and its pipeline, each as a sentence
with what would work. All need the sizes of the mesh to be known.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.problems.context import context_problems
from mesh_lm.parallel.problems.experts import expert_problems
from mesh_lm.parallel.problems.flat import flat_problems
from mesh_lm.parallel.problems.layers import half_problems, layer_problems
from mesh_lm.parallel.problems.noise_scale import noise_scale_problems
from mesh_lm.parallel.problems.owner import owner_problems
from mesh_lm.parallel.problems.pipeline import permute_problems, pipeline_problems
from mesh_lm.parallel.problems.reduction import reduction_problems
from mesh_lm.parallel.problems.residual import residual_problems
from mesh_lm.parallel.problems.rows import axis_problems, row_problems, unused_axis_problems
from mesh_lm.parallel.problems.sizes import batch_problems, size_problems

_CHECKS = (
    axis_problems,
    unused_axis_problems,
    row_problems,
    context_problems,
    expert_problems,
    reduction_problems,
    residual_problems,
    flat_problems,
    size_problems,
    batch_problems,
    half_problems,
    layer_problems,
    pipeline_problems,
    permute_problems,
    owner_problems,
    noise_scale_problems,
)


def parallel_problems(config: TrainConfig) -> Iterator[str]:
    """Yields the problems that all checks of this package find."""
    for check in _CHECKS:
        yield from check(config)
