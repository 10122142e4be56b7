"""gpt_tiny with a mixture of experts: the first layer as it is, and in each of the others eight
experts, half as wide as the MLP of gpt_tiny, of which each token uses two. A token uses as many
weights, of more than half as many again.
"""

import dataclasses

from mesh_lm.config import TrainConfig, load
from mesh_lm.model import SegmentConfig
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
    # Dense, as the first layers of DeepSeek-V3: before any attention, a router sees which token it
    # is and nothing else. With experts there, too, the model learns more slowly than gpt_tiny.
    segments = (SegmentConfig("first", 1), SegmentConfig("others", 3, "moe"))
    model = dataclasses.replace(config.model, segments=segments, experts=experts)
    return dataclasses.replace(config, model=model, output="runs/gpt_tiny_moe")
