"""Qwen3-30B-A3B (arXiv 2505.09388): 30.5 B parameters, of which a token uses 3.3 B; eight nodes of
eight GPUs.

Each GPU of a node has 16 experts of every layer. The layers gather their weights over the nodes
once a microbatch and keep them until their backward passes, which the memory has room for (zero3,
kept_layers). By `mesh-lm plan` on 64 H100s compute then waits 10 % of a step of 5.9 s for the
network; 33 % of 7.7 s if the backward passes gather again. Gathered tokens instead of an
all-to-all: 12 %, 5.8 s, and XLA copies what it has gathered once more. `distributed`, with
microbatches of one sequence: 14 % of 6.9 s. FSDP of all experts inside a node, without an exchange:
45 % of 9.8 s, and it does not fit. Half of the compute is moving rows and weights in memory, as
experts are only 768 wide.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig, ExpertsConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=151_936,
            seq_len=4096,
            n_layers=48,
            block="moe",
            d_model=2048,
            n_heads=32,
            n_kv_heads=4,
            head_dim=128,
            d_ff=6144,
            experts=ExpertsConfig(number=128, active=8, d_ff=768, balance_loss=0.001),
            positions="rotary",
            rope_theta=1e6,
            norm="rmsnorm",
            norm_eps=1e-6,
            activation="swiglu",
            biases=False,
            tied=False,
            qk_norm=True,
            remat="save_names",
            kept_layers=48,
        ),
        output="runs/qwen3_30b_a3b",
        mesh=MeshConfig(data=-1, expert=8),
        rules=preset("zero3+experts_padded"),
        train=TrainLoop(steps=240_000, global_batch=1024, microbatches=8, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="pipeline"),
    )
