"""The output directory of a run, without training: random weights of a tiny model, saved as by
train.py, and a byte tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
from support import GPT, shard_on

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.config import TrainConfig
from mesh_lm.data.tokenizer import Tokenizer, load_tokenizer
from mesh_lm.inference.trained import TOKENIZER
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state.initial import fresh_state

MODEL = dataclasses.replace(GPT, vocab_size=272, seq_len=48, init_std=0.3)
BYTES: Tokenizer = load_tokenizer("bytes")


def write(output: Path, model: DecoderConfig = MODEL) -> TrainConfig:
    """Step 3 of a run on one device with rules ddp."""
    config = TrainConfig(model=model, output=str(output))
    layout = ModelLayout.of(model, shard_on("ddp"))
    params = jax.jit(layout.init, out_shardings=layout.shardings("params"))(jax.random.key(4))
    with Checkpoints(config) as checkpoints:
        optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
        state = fresh_state(layout, optimizer, params) | {"step": jax.device_put(np.int32(3))}
        checkpoints.save(
            3, state, {"position": 3, "tokenizer": BYTES.fingerprint}, layout, optimizer
        )
    (output / TOKENIZER).mkdir()
    BYTES.save(output / TOKENIZER)
    return config
