"""The number of this project's stack frames between the caller of the jitted step and an einsum,
when it is traced."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import GPT, host_batch, shard_on

from mesh_lm.config import OptimizerConfig, PipelineConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import abstract_state
from mesh_lm.training.step import train_step

ROOT = Path(__file__).parents[3]
OWN = [str(ROOT / part) for part in ("mesh_lm", "sharding_rules", "pallas_kernels")]


@pytest.mark.parametrize(
    ("mesh", "pipeline", "most"),
    [
        ({"data": 2}, PipelineConfig(), 13),
        ({"pipeline": 2}, PipelineConfig(), 16),
        ({"pipeline": 2}, PipelineConfig(stash="residuals"), 16),
    ],
    ids=["one stage", "a pipeline", "a pipeline that stashes residuals"],
)
def test_own_frames_to_the_matmul(
    mesh: dict[str, int], pipeline: PipelineConfig, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: dict[str, list[str]] = {}
    einsum = jnp.einsum

    def watched(equation: str, *operands, **options):
        frames = [
            frame for frame in traceback.extract_stack() if frame.filename.startswith(tuple(OWN))
        ]
        names = [f"{Path(frame.filename).stem}.{frame.name}" for frame in frames]
        if names[-1] == "layers._matmul":
            ways[" > ".join(names)] = names
        return einsum(equation, *operands, **options)

    monkeypatch.setattr(jnp, "einsum", watched)
    layout, optimizer = (
        ModelLayout.of(GPT, shard_on("ddp", **mesh), pipeline),
        Optimizer(OptimizerConfig(), 10),
    )
    jax.eval_shape(
        train_step(layout, optimizer, 0), abstract_state(layout, optimizer), host_batch(2)
    )
    longest = max(ways.values(), key=len)
    assert any("dense.__call__" in way for way in ways)
    # The caller of the step is one more.
    assert 1 + len(longest) <= most, " > ".join(["caller", *longest])
