"""Compares attention with its peers, and times training, on a Hopper GPU in less than 8 minutes: python benchmarks/gpu_suite.py

Run gpu_truth.py first on such a machine: it checks that our kernels run there at all, and that the lab's figures hold.

The parts, most important first: `headline` and `peers` time attention (ours, cuDNN, jax's Mosaic example, PyTorch's SDPA); `correct`
compares ours with the formula, every feature, forward and backward, and bit by bit with reruns; `end_to_end` compares train steps of three
models with torch.compile and SDPA, with power; `deviceless` runs a program that was compiled without a GPU; `training` kills and resumes
train.py; `autotune` uses the remaining time. Only if --parts names them: `resume`, `losses`, `rerun`, `layouts`, about the trainer, and
`variants`, which times schedules and tile sizes of our forward against each other.

Each part runs in processes of its own with a time limit, so that a crash ends that part only; several compile in parallel, one measures
(gpu_lock.py). Results are written after each row. Needs jax, numpy, flax, optax, orbax-checkpoint; uses torch and matplotlib if installed;
`training` also needs grain, tyro, tokenizers and tensorboardX. Without a GPU it prints that and exits with status 0. `--dry-run` does the
same on a CPU, with tiny shapes and an interpreted kernel. TORCH_PYTHON names a Python that has torch, if this one does not.
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
"""470 s in all, the start included. Time that a part does not use is available to later parts."""
BY_NAME = (
    Part(gpu_training.losses, 60),
    Part(gpu_training.resume, 60),
    Part(gpu_training.rerun, 90),
    Part(gpu_training.layouts, 80),
    Part(gpu_attention.variants, 240),
)
SLOW = 8
"""The factor of a part's time limit in a dry run: an interpreter on two cores is slower than a GPU."""


if __name__ == "__main__":
    sys.exit(suite("gpu_suite", __doc__ or "", PARTS, BY_NAME, slow=SLOW, finish=gpu_charts.draw))
