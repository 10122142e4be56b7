"""A family of GPT models, one for each number of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.studies.ranges import size_word

VOCABULARY = 50_304
SEQUENCE = 4096
BATCH = 2048
"""Sequences of a step: 8.4 million tokens."""
HEAD = 128
_WIDTH_STEP = 1024
"""Widths are multiples of it, so that eight GPUs can divide the heads."""
_LAYER_STEP = 8
"""Depths are multiples of it, so that pipelines of eight stages divide the layers."""
_WIDEST = 65_536
_ASPECT = 128
"""The width over the layers that the family stays near to, as Megatron-LM's models do."""
_CLOSE = 0.1
"""The share by which a model may miss its number of parameters, if any is as close."""


def decoder(n_params: float, seq_len: int = SEQUENCE, batch: int = BATCH) -> TrainConfig:
    """Returns the run of the model with about this number of parameters.

    Among the models that are within a tenth of it, the width over the layers is nearest to 128;
    if there are none, it is the model that is nearest.

    Args:
      seq_len: tokens of a sequence.
      batch: sequences of a step.
    """
    candidates = list(_candidates(n_params, seq_len))
    misses = [abs(model.n_params() / n_params - 1) for model in candidates]
    limit = max(_CLOSE, min(misses))
    close = [model for model, miss in zip(candidates, misses, strict=True) if miss <= limit]
    model = min(close, key=lambda one: abs(math.log(one.d_model / one.n_layers / _ASPECT)))
    return TrainConfig(
        model=model,
        output=f"runs/decoder_{size_word(n_params)}",
        train=TrainLoop(global_batch=batch),
    )


def _candidates(n_params: float, seq_len: int) -> Iterator[DecoderConfig]:
    """Yields models of every width, each of the depth that is nearest."""
    for width in range(_WIDTH_STEP, _WIDEST + 1, _WIDTH_STEP):
        in_layers = n_params - 2 * VOCABULARY * width
        layers = round(in_layers / (12 * width**2) / _LAYER_STEP) * _LAYER_STEP
        if layers < _LAYER_STEP:
            if width == _WIDTH_STEP:
                yield _model(width, _LAYER_STEP, seq_len)
            return
        yield _model(width, layers, seq_len)


def _model(width: int, layers: int, seq_len: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCABULARY,
        seq_len=seq_len,
        n_layers=layers,
        d_model=width,
        n_heads=width // HEAD,
        tied=False,
        remat="save_names",
    )
