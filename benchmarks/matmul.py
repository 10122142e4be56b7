"""Time of square bf16 matmuls by size, as a share of the device's peak.

Adds them to a profile that `mesh-lm plan --hw=profile.json` takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
from record import Record, Row, options

from mesh_lm.distributed import processes
from mesh_lm.errors import ConfigError
from mesh_lm.measure.matmul import measured
from mesh_lm.measure.profiles import profile_here, require_mergeable, save
from sharding_rules.lab import LabError
from sharding_rules.lab.profile import Matmul

_SIZES = {"gpu": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}


def main(arguments: argparse.Namespace) -> int:
    file = arguments.profile or arguments.output / "profile.json"
    platform = jax.devices()[0].platform
    sizes = _sizes(arguments.sizes) or _SIZES.get(platform, _SIZES["cpu"])
    try:
        require_mergeable(profile_here(), file)
        if arguments.quick:
            found = tuple(measured((64, 128), seconds=0.01))
        else:
            found = tuple(measured(sizes, seconds=arguments.seconds))
        profile = profile_here(matmuls=found)
        save(profile, file)
    except LabError as error:
        raise ConfigError(str(error)) from error
    record = Record(f"matmul{'-quick' * arguments.quick}", arguments.output, device=profile.device)
    record.table("Square matmuls in bf16", [_row(matmul) for matmul in found])
    record.write()
    print(f"wrote {file}")
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    words = [word for word in text.split(",") if word]
    for word in words:
        if not word.isdecimal() or not int(word):
            raise ConfigError(f"--sizes={word}: expected sizes of matrices, as 1024,8192")
    return tuple(map(int, words))


def _row(matmul: Matmul) -> Row:
    return {
        "size": matmul.size,
        "us": matmul.us,
        "tflop_per_s": matmul.flops_per_s / 1e12,
        "share_of_peak": matmul.share,
    }


def _parser() -> argparse.ArgumentParser:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--profile", type=Path, help="the profile's .json (default: profile.json in --output)"
    )
    parser.add_argument(
        "--sizes", default="", help="of the matrices (default: 1024 to 8192, on a CPU 128 to 1024)"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="that a sample lasts at least")
    return parser


if __name__ == "__main__":
    sys.exit(processes.run(main, _parser().parse_args()))
