"""Mixtral 8x7B (arXiv 2401.04088): 46.7 B parameters, of which a token uses 12.9 B; 16 nodes of
eight GPUs.

Each GPU of a node has one expert of every layer, and the layers gather their weights over the nodes
(zero3), which takes as long as the matmuls of two sequences. The XLA flags of `pipeline`, here
without stages, let the exchanges of tokens run beside these long collectives: by `mesh-lm plan` on
128 H100s a step takes 1.46 times the model's own time, and 2.21 times with the flags of `layers`.
In 4 stages (8 chunks, microbatches of one sequence) it is 1.68: the gradients of experts are
accumulated twice as often, and those of the tables in every tick. Halves of the batch hide more of
the exchanges, and move more in memory: 1.48. `distributed`, whose weights and gradients are
complete, would need 73.2 GiB with microbatches of one sequence, and take 1.86 times.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig, ExpertsConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=32_000,
            seq_len=4096,
            n_layers=32,
            block="moe",
            d_model=4096,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14_336,
            experts=ExpertsConfig(number=8, active=2, balance_loss=0.01),
            positions="rotary",
            rope_theta=1e6,
            norm="rmsnorm",
            activation="swiglu",
            biases=False,
            tied=False,
            remat="save_names",
        ),
        output="runs/mixtral_8x7b",
        mesh=MeshConfig(data=-1, expert=8),
        rules=preset("zero3+experts_padded"),
        train=TrainLoop(steps=240_000, global_batch=1024, microbatches=4, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="pipeline"),
    )
