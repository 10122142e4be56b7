"""Rehearses the commands of gpu_hour.md with --dry-run, in the image of a bare GPU machine: python benchmarks/rehearse.py

The image: this Python, or the one that --python names, without the packages that such a machine lacks, and without NVIDIA's nvcc wheel.
Exits with status 1 if a command fails, or if a part is not ok. Nothing is installed or removed: a start-up file hides the packages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HOUR = ROOT / "benchmarks" / "gpu_hour.md"
LACKING = ("grain", "array_record", "portpicker", "tyro", "docstring_parser", "typeguard", "tensorboardX")
"""Modules of the wheels that gpu_hour.md carries."""
HIDDEN = (*LACKING, "nvidia.cu13.bin", "nvidia.cuda_nvcc")
"""Modules that the image has not."""
START_UP = f"""
import importlib.machinery, os, sys

HIDDEN = {HIDDEN!r}


class Hiding:
    \"\"\"A finder of modules that does not see some of them.\"\"\"

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        hidden = any(name == one or name.startswith(one + ".") for one in HIDDEN)
        return None if hidden else self.finder.find_spec(name, *rest)


sys.meta_path[:] = [Hiding(finder) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
"""


class Command(NamedTuple):
    """A command of gpu_hour.md."""

    seconds: int
    """It takes at most."""
    words: tuple[str, ...]

    @property
    def script(self) -> str:
        """The path of its Python file."""
        return self.words[1]

    @property
    def parts(self) -> tuple[str, ...]:
        """Those that it names."""
        return next((tuple(word.partition("=")[2].split(",")) for word in self.words if word.startswith("--parts=")), ())


def commands(text: str) -> list[Command]:
    """Returns the commands of the page, in order."""
    return [Command(int(seconds), tuple(line.split())) for seconds, line in re.findall(r"```command (\d+)\n(.+)\n```", text)]


def image(directory: Path) -> dict[str, str]:
    """Returns the environment of a process in the image. directory: for its start-up file."""
    (directory / "sitecustomize.py").write_text(START_UP)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS", "TORCH_PYTHON")}
    return {**kept, "PYTHONPATH": f"{directory}:{ROOT}", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}


def rehearsed(command: Command, python: str, results: Path, environment: dict[str, str]) -> list[str]:
    """Runs a command as a dry run. Returns what went wrong."""
    words = [word.replace("$RESULTS", str(results)) for word in command.words[1:]]
    done = subprocess.run([python, *words, "--dry-run"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    name = f"{Path(command.script).stem}-dry-run"
    files = sorted(results.glob(f"{name}_*.json"))
    rows = json.loads(files[-1].read_text())["tables"]["Parts"]["rows"] if files else []
    status = {row["part"]: row["status"] for row in rows}
    wrong = [f"{row['part']}: {row['problems']}" for row in rows if row["status"] != "ok"]
    wrong += [f"{part}: did not run" for part in command.parts if part not in status]
    for row in rows:
        if row["part"] in (command.parts or status) and row.get("left_out"):
            print(f"  {row['part']} leaves out: {row['left_out']}", flush=True)
    return wrong + ([f"exit status {done.returncode}: {done.stderr[-500:]}"] if done.returncode and not wrong else [])


def main() -> int:
    """Rehearses all commands, and prints what went wrong. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the image's Python (default: this one)")
    parser.add_argument("--only", type=int, default=0, help="the number of one command (default: all)")
    parser.add_argument("--results", type=Path, help="keep the results here (default: a temporary directory)")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rehearse-") as directory:
        environment, results = image(Path(directory)), arguments.results or Path(directory) / "results"
        for number, command in enumerate(commands(HOUR.read_text()), 1):
            if arguments.only not in (0, number):
                continue
            print(f"{number}. {' '.join(command.words)}", flush=True)
            began = time.monotonic()
            wrong = rehearsed(command, arguments.python, results, environment)
            failed += bool(wrong)
            print("\n".join(f"  FAILED {line}" for line in wrong) or f"  ok, {time.monotonic() - began:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
