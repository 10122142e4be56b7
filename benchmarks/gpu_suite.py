"""Runs our kernels on a Hopper GPU, compares attention with its peers, and times training: python
benchmarks/gpu_suite.py

gpu_minutes.py runs most of these parts as blocks, as many as fit into the seconds that there are;
begin with that.

The parts, in order: `smoke` runs each kernel alone at a small shape; `autotune` times tiles for the
headline, and all later parts use the table it writes; `headline` and `peers` time attention (ours,
cuDNN, tokamax, jax's Mosaic example, PyTorch's SDPA); `variants` times those of our kernels that
only a GPU can rank; `correct` compares ours with the formula, every feature, forward and backward,
and bit by bit with reruns; `grouped` times the grouped matmul beside a dense one, and `stacked` the
stacked matmul beside cuBLAS; `end_to_end` compares train steps of three models with torch.compile
and SDPA, with power; `deviceless` runs a program that was compiled without a GPU; `training` kills
and resumes train.py. Only if --parts names them: `ncu` and `sanitizer`, our kernels under NVIDIA's
tools; `resume`, `losses`, `rerun`, `layouts`, about the trainer.

Each part runs in processes of its own with a time limit, so that a crash ends that part only;
several compile in parallel, one measures (gpu_lock.py). Results are written after each row;
--resume takes over what an earlier command measured, parts and rows, with the same --output, device
and kernels. Needs jax, numpy, flax, optax, orbax-checkpoint; uses torch and matplotlib if
installed; `training` also needs grain, tyro, tokenizers and tensorboardX. Without a GPU it prints
that and exits with status 0. `--dry-run` does the same on a CPU, with tiny shapes and an
interpreted kernel. TORCH_PYTHON names a Python that has torch, if this one does not.
"""

from __future__ import annotations

import sys

import gpu_attention
import gpu_charts
import gpu_kernels
import gpu_training
from gpu_lab import Part, suite

PARTS = (
    Part(gpu_kernels.smoke, 120), Part(gpu_kernels.autotune, 160), Part(gpu_attention.headline, 90),
    Part(gpu_kernels.variants, 90),
    Part(gpu_attention.correct, 330), Part(gpu_kernels.grouped, 40), Part(gpu_kernels.stacked, 60),
    Part(gpu_attention.peers, 200),
    Part(gpu_training.end_to_end, 260), Part(gpu_attention.deviceless, 40),
    Part(gpu_training.training, 70),
)  # fmt: skip
"""The seconds of each, the start included. Time that a part does not use is available to later
parts of the same command."""
BY_NAME = (
    Part(gpu_kernels.ncu, 150),
    Part(gpu_kernels.sanitizer, 240),
    Part(gpu_training.losses, 60),
    Part(gpu_training.resume, 60),
    Part(gpu_training.rerun, 90),
    Part(gpu_training.layouts, 80),
)
SLOW = 8
"""The factor of a part's time limit in a dry run: an interpreter on two cores is slower than a
GPU."""


if __name__ == "__main__":
    sys.exit(suite("gpu_suite", __doc__ or "", PARTS, BY_NAME, slow=SLOW, finish=gpu_charts.draw))
