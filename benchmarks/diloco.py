"""Trains gpt_tiny on two islands (DiLoCo) and with data parallelism, on two CPU devices: the
held-out loss, and the bytes between the two.

All runs see the same tokens. The last one is the control: what one island alone reaches, with its
half of the batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from extend_context import called
from record import Record, Row, options

from mesh_lm.config import load
from mesh_lm.planning.diloco import wire_bytes

STEPS, EVERY, ISLANDS = 300, 10, 2
APART = [
    "--rules=diloco",
    f"--mesh.island={ISLANDS}",
    "--mesh.data=1",
    f"--launch.cpu-devices={ISLANDS}",
]


def main() -> int:
    args = options(__doc__ or "").parse_args()
    record, rows = Record(f"diloco{'-quick' * args.quick}", args.output), []
    steps, every = (4, 2) if args.quick else (STEPS, EVERY)
    outer = [*APART, f"--optimizer.outer-steps={every}"]
    runs = {
        "ddp": (1, ["--rules=ddp", f"--launch.cpu-devices={ISLANDS}"]),
        "diloco, momentum 0.9": (every, [*outer, "--optimizer.outer-momentum=0.9"]),
        "diloco, momentum 0.5": (every, [*outer, "--optimizer.outer-momentum=0.5"]),
        "one island alone": (
            0,
            ["--rules=ddp", "--launch.cpu-devices=1", f"--train.global-batch={16 // ISLANDS}"],
        ),
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, (between, words) in runs.items():
            command = train(name.replace(", ", "-").replace(" ", "-"), steps, words)
            begin = time.monotonic()
            called(command, Path(directory))
            rows.append(
                about(name, Path(directory), command, between) | {"run_s": time.monotonic() - begin}
            )
            record.table(
                "Islands against data parallelism",
                rows,
                f"{steps} steps; the loss is of 64 held-out sequences.",
            )
            record.write()
    return 0


def train(output: str, steps: int, words: list[str]) -> list[str]:
    """Returns the words of the command of a run."""
    quiet = [
        "--train.eval-every=0",
        "--train.eval-sequences=64",
        "--train.sample-tokens=0",
        "--checkpoint.every=0",
    ]
    return ["train", "gpt_tiny", f"--output={output}", f"--train.steps={steps}", *quiet, *words]


def about(name: str, directory: Path, command: list[str], every: int) -> Row:
    """Returns a row. every: steps between two sums over both devices; 0: none."""
    config, output = load("configs/gpt_tiny.py"), directory / command[2].partition("=")[2]
    lines = [
        json.loads(line)
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    (heldout,) = (line["heldout_loss"] for line in lines if "heldout_loss" in line)
    sent = wire_bytes(4 * config.model.n_params(), ISLANDS, every) if every else 0.0
    row: Row = {
        "run": name,
        "heldout_nats_per_token": heldout,
        "sent_bytes_per_device_and_step": sent,
    }
    return row | {
        "sent_bytes_per_token": ISLANDS * sent / config.tokens_per_step,
        "command": " ".join(["mesh-lm", *command]),
    }


if __name__ == "__main__":
    sys.exit(main())
