"""Attention against its peers and training on a Hopper GPU, in one command under 8 minutes: python benchmarks/gpu_suite.py

What comes first on such a machine is gpu_truth.py: whether our kernels run there at all, and whether the lab's figures hold.

Parts, in the order of what is worth most: `headline` and `peers` time attention (ours, cuDNN, jax's Mosaic example, PyTorch's SDPA);
`correct` compares ours with the formula, every feature, forward and backward, and reruns it bit by bit; `end_to_end` times train steps of
three models beside torch.compile and SDPA, with power; `deviceless` runs a program that was compiled where no GPU is seen; `training` kills
and resumes train.py; `autotune` takes what is left. By name only (--parts): `resume`, `losses`, `rerun`, `layouts`, about the trainer.

Each part runs in processes of its own with a time limit, so that none takes the others with it; several compile at once, one measures
(gpu_lock.py). Results are written after each row. Needs jax, numpy, flax, optax, orbax-checkpoint; torch and matplotlib if there are any;
grain, tyro, tokenizers and tensorboardX for `training` alone. Without a GPU it says so and ends with status 0. `--dry-run` goes the same
way on a CPU, with tiny shapes and our kernel interpreted; TORCH_PYTHON names a Python that has torch, where this one has not.
"""

from __future__ import annotations

import sys

import gpu_attention
import gpu_charts
import gpu_training
from gpu_lab import Part, suite

PARTS = (
    Part(gpu_attention.headline, 60), Part(gpu_attention.correct, 75), Part(gpu_attention.peers, 115), Part(gpu_training.end_to_end, 125),
    Part(gpu_attention.deviceless, 30), Part(gpu_training.training, 45), Part(gpu_attention.autotune, 20),
)  # fmt: skip
"""470 s in all, the start included. What a part leaves over goes to those after it."""
BY_NAME = (Part(gpu_training.losses, 60), Part(gpu_training.resume, 60), Part(gpu_training.rerun, 90), Part(gpu_training.layouts, 80))
SLOW = 8
"""A dry run's time is so many times a part's: an interpreter on two cores is slower than a GPU."""


if __name__ == "__main__":
    sys.exit(suite("gpu_suite", __doc__ or "", PARTS, BY_NAME, slow=SLOW, finish=gpu_charts.draw))
