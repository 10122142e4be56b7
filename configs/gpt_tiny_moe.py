"""gpt_tiny with a mixture of experts: eight in each layer, half as wide as the MLP of gpt_tiny, of
which each token uses two. A token uses as many weights, of nearly twice as many.
"""

import dataclasses

from mesh_lm.config import TrainConfig, load
from mesh_lm.model.experts_config import ExpertsConfig


def get_config() -> TrainConfig:
    config = load("gpt_tiny")
    experts = ExpertsConfig(
        number=8,
        active=2,
        d_ff=176,
        # Without these two the busiest expert soon has three times as many tokens as the mean.
        balance_loss=0.01,
        bias=True,
        bias_rate=0.005,
    )
    model = dataclasses.replace(config.model, block="moe", experts=experts)
    return dataclasses.replace(config, model=model, output="runs/gpt_tiny_moe")
