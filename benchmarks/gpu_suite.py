"""Everything worth knowing from a rare hour on a Hopper GPU, in one command under 8 minutes: python benchmarks/gpu_suite.py

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
import tempfile
import time
from pathlib import Path

import gpu_attention
import gpu_charts
import gpu_training
from gpu_lab import Lab, Part, measure, probed
from record import options

PARTS = (
    Part(gpu_attention.headline, 60), Part(gpu_attention.correct, 75), Part(gpu_attention.peers, 115), Part(gpu_training.end_to_end, 125),
    Part(gpu_attention.deviceless, 30), Part(gpu_training.training, 45), Part(gpu_attention.autotune, 20),
)  # fmt: skip
"""470 s in all, the start included. What a part leaves over goes to those after it."""
BY_NAME = (Part(gpu_training.losses, 60), Part(gpu_training.resume, 60), Part(gpu_training.rerun, 90), Part(gpu_training.layouts, 80))
SLOW = 8
"""A dry run's time is so many times a part's: an interpreter on two cores is slower than a GPU."""


def main() -> int:
    parser = options(__doc__ or "", quick="--dry-run", quick_help="the same on a CPU, with tiny shapes, in minutes")
    names = [part.run.__name__ for part in (*PARTS, *BY_NAME)]
    parser.add_argument("--parts", default="", help=f"which, with commas: {', '.join(names)} (default: up to autotune)")
    parser.add_argument("--seconds", type=float, default=0.0, help="time for the parts in all, shared out as usual (default: theirs)")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",") if arguments.parts else [part.run.__name__ for part in PARTS]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(names)}")
    parts = [part for part in (*PARTS, *BY_NAME) if part.run.__name__ in chosen]
    scale = arguments.seconds / sum(part.seconds for part in parts) if arguments.seconds else SLOW if arguments.dry_run else 1.0
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as directory:
        lab = Lab(Path(directory), arguments.dry_run)
        lab.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes share the GPU
        began = time.monotonic()
        if isinstance(device := probed(lab, "--dry-run"), int):
            return device
        if not lab.dry_run:
            lab.implementations = sorted(device["implementations"], key=lambda name: ("xla", "cudnn", name).index(name))
        name = f"gpu_suite{'-dry-run' * lab.dry_run}"
        with lab.power:
            scaled = [Part(part.run, part.seconds * scale) for part in parts]
            return measure(name, scaled, lab, device, arguments.output, began, gpu_charts.draw)


if __name__ == "__main__":
    sys.exit(main())
