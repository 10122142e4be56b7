"""configs/gpt_tiny.py for the benchmarks of the host: unchanged, or, when quick, smaller and on a
small text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from record import ROOT

from mesh_lm.config import TrainConfig
from mesh_lm.configs import gpt_tiny
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training.check import check
from sharding_rules import Shard, make_mesh

MODEL = {"n_layers": 1, "d_model": 32, "seq_len": 64, "vocab_size": 512, "loss_chunk": 512}
"""Fields of the model that a quick run changes."""


def text(directory: Path) -> Path:
    """Writes a small corpus: the source of mesh_lm as one file."""
    path = directory / "text.txt"
    path.write_text(
        "\n".join(
            file.read_text(encoding="utf-8") for file in sorted((ROOT / "mesh_lm").glob("**/*.py"))
        ),
        encoding="utf-8",
    )
    return path


def config(directory: Path, quick: bool, steps: int) -> TrainConfig:
    """Returns a run of `steps` steps that writes to `directory` and saves no checkpoint; quick also
    puts its corpus there."""
    base = gpt_tiny.get_config()
    model, data = base.model, base.data
    if quick:
        model = dataclasses.replace(model, **MODEL)
        data = dataclasses.replace(
            data, path=str(text(directory)), cache=str(directory / "cache"), tokenizer_vocab=512
        )
    train = dataclasses.replace(base.train, steps=steps)
    checkpoint = dataclasses.replace(base.checkpoint, every=10**9)
    run = dataclasses.replace(
        base,
        model=model,
        data=data,
        train=train,
        checkpoint=checkpoint,
        output=str(directory / "run"),
    )
    return check(run, jax.device_count())


def layout(run: TrainConfig) -> ModelLayout:
    return ModelLayout.of(run.model, Shard(run.rules, make_mesh(run.mesh)))
