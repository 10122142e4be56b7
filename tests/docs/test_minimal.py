"""docs/minimal.py in a process of its own, as a reader runs it: two strategies, the same falling
losses, and short enough to read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "minimal.py"


def run(*arguments: str) -> tuple[str, list[float]]:
    """Its first line, and its losses."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | {
        "PYTHONPATH": str(ROOT)
    }
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, str(FILE), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    return first, [
        float(loss)
        for line in lines
        for loss in re.fullmatch(r"step \d+: loss (\d+\.\d+)", line).groups()
    ]


@pytest.mark.slow
def test_one_string_changes_the_strategy_and_nothing_else() -> None:
    first, losses = run()
    up, moments = first.split(", its moments are ")
    assert up == (
        "fsdp+megatron on data=2 x fsdp=2 x tensor=2: up ('embed', 'mlp') (64, 256) is P('fsdp', "
        "'tensor')"
    )
    assert moments == "P('fsdp', 'tensor')"
    assert len(losses) == 9 and losses[-1] < 0.6 * losses[0]
    first, others = run("zero1")
    assert first == (
        "zero1 on data=8: up ('embed', 'mlp') (64, 256) is P(None, None), its moments are "
        "P('data', None)"
    )
    assert others == pytest.approx(losses, rel=1e-5)


def test_it_is_short_and_needs_no_trainer() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 140
    packages = {
        word.split(".")[0] for line in lines for word in re.findall(r"^(?:import|from) (\S+)", line)
    }
    assert packages - set(sys.stdlib_module_names) == {
        "jax",
        "numpy",
        "optax",
        "flax",
        "sharding_rules",
    }
