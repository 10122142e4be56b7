"""Rehearses gpu_minutes.py in the image of a bare GPU machine: python benchmarks/rehearse.py
[options of gpu_minutes.py]

The image: this Python, or the one that REHEARSE_PYTHON names, without the packages that such a
machine lacks, and without NVIDIA's nvcc wheel. Exits with status 1 if a block fails. Nothing is
installed or removed: a start-up file hides the packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LACKING = (
    "grain",
    "array_record",
    "portpicker",
    "tyro",
    "docstring_parser",
    "typeguard",
    "tensorboardX",
)
"""Modules of the wheels that gpu_minutes.md carries."""
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


def image(directory: Path) -> dict[str, str]:
    """Returns the environment of a process in the image. directory: for its start-up file."""
    (directory / "sitecustomize.py").write_text(START_UP, encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "XLA_FLAGS", "TORCH_PYTHON")
    }
    return {
        **environment,
        "PYTHONPATH": f"{directory}:{ROOT}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def main() -> int:
    """Rehearses all blocks, or those of --blocks. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="rehearse-") as directory:
        command = [
            os.environ.get("REHEARSE_PYTHON", sys.executable),
            "benchmarks/gpu_minutes.py",
            "--dry-run",
        ]
        command += [f"--output={directory}/results", *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=image(Path(directory)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
