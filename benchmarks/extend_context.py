"""Extends the context of a small model: short sequences first, then long ones from its weights,
over a ring of 8 CPU devices.

The steps of docs/context.md, on the source of Python's standard library. A third run continues with
short sequences for as many tokens, to tell what more training does from what a longer context does.
All are then scored on long files of NumPy's source, which none has seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, Record, Row, options

SHORT, LONG, DEVICES = 128, 1024, 8
TOKENS = 4096
"""In a step."""
STEPS, MORE = 600, 300
LONGER = ["--model.rope-scaling=8", f"--model.rope-original-seq-len={SHORT}"]
RING = [
    "--rules=ring",
    f"--launch.cpu-devices={DEVICES}",
    "--mesh.data=1",
    f"--mesh.sequence={DEVICES}",
]
TEXTS = ("_function_base_impl.py", "_nanfunctions_impl.py", "_npyio_impl.py")
"""Files of numpy/lib of 70 kB and more."""


def main() -> int:
    args = options(__doc__ or "").parse_args()
    record = Record(f"extend_context{'-quick' * args.quick}", args.output)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        workdir = Path(directory)
        text = workdir / "text"
        text.mkdir()
        for name in TEXTS[-1:] if args.quick else TEXTS:
            (text / name.replace(".py", ".txt")).write_text(
                (Path(np.__file__).parent / "lib" / name).read_text(encoding="utf-8"),
                encoding="utf-8",
            )
        overrides = [
            "--init-from=short",
            "--optimizer.learning-rate=4e-3",
            "--optimizer.warmup-steps=10",
        ]
        runs = {
            "short": (SHORT, STEPS, []),
            "short, continued": (SHORT, MORE, overrides),
            "long": (LONG, MORE, [*overrides, *LONGER, *RING]),
        }
        for name, (length, steps, arguments) in runs.items():
            steps = 4 if args.quick else steps
            output = name.replace(", ", "-")
            command = train(output, length, steps, arguments)
            begin = time.monotonic()
            called(command, workdir)
            seconds = time.monotonic() - begin
            called(
                ["evaluate", f"--checkpoint={output}", "--text=text", "--json=score.json"], workdir
            )
            score = json.loads((workdir / "score.json").read_text(encoding="utf-8"))
            rows.append(
                about(name, length, steps, seconds, score)
                | {"command": " ".join(["mesh-lm", *command])}
            )
            record.table(
                "Loss on long texts",
                rows,
                f"of {len([*text.iterdir()])} files, in windows of seq_len that half overlap.",
            )
            record.write()
    return 0


def train(output: str, length: int, steps: int, arguments: Sequence[str]) -> list[str]:
    """Returns the words of the command that trains on sequences of this length."""
    batch = [
        f"--model.seq-len={length}",
        f"--train.global-batch={TOKENS // length}",
        f"--train.steps={steps}",
    ]
    quiet = ["--train.eval-every=0", "--train.eval-sequences=8", "--train.sample-tokens=0"]
    return [
        "train",
        "gpt_tiny",
        f"--output={output}",
        "--data.documents=packed",
        *batch,
        *quiet,
        *arguments,
    ]


def called(command: Sequence[str], workdir: Path) -> None:
    """Runs mesh-lm. Raises RuntimeError with its last output if it fails."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "mesh_lm", *command],
        cwd=workdir,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")


def about(name: str, length: int, steps: int, seconds: float, score: dict[str, Any]) -> Row:
    row: Row = {
        "model": name,
        "seq_len": length,
        "steps": steps,
        "tokens": steps * TOKENS,
        "train_s": seconds,
    }
    return (
        row
        | {key: score[key] for key in ("nats_per_token", "bits_per_byte", "perplexity")}
        | {"scored_tokens": score["tokens"]}
    )


if __name__ == "__main__":
    sys.exit(main())
