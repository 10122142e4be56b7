"""The README's experiment and commands, taken from the README itself, and its length."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, bare
from runnable import READER

from benchmarks import plan_page
from sharding_rules import PRESETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.deviceless
def test_the_experiment(reports: str, tmp_path: Path) -> None:
    """As a reader runs it: in a file of their own, by pytest, with nothing in the environment. CI
    does so with the installed wheel."""
    block = re.search(r"```python\n(.*?)```", README, re.S)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line]) <= 12
    (tmp_path / "test_mine.py").write_text(block[1], encoding="utf-8")
    command = [READER or sys.executable, "-m", "pytest", "-q", str(tmp_path / "test_mine.py")]
    environment = bare(HOME=str(Path(reports).parent))  # where the config keeps what is compiled
    done = subprocess.run(
        command,
        cwd=tmp_path if READER else ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, (
        done.stdout[-4000:] + done.stderr[-2000:]
    )


def test_the_plan_of_gpt_175b() -> None:
    """The numbers beside the picture are those of docs/configs.md's raw results."""
    rows = json.loads(plan_page.newest().read_text(encoding="utf-8"))["tables"]["Configs"]["rows"]
    (row,) = [row for row in rows if row["name"] == "gpt_175b"]
    said = (
        f"GPT-3's {row['parameters'] / 1e9:.1f} B parameters on {row['devices']:,} H100s need "
        f"{row['peak_gib']:.1f} GiB of the {row['usable_gib']:.1f} that a run may take of each "
        f"GPU, and in a step each GPU sends {row['sent over tensor, GiB']:.1f} GiB over NVLink and "
        f"{row['sent_gib'] - row['sent over tensor, GiB']:.1f} over the network (exact); a step "
        f"takes {row['step_s']:.1f} to {row['sustained_step_s']:.1f} s (predicted, never measured)"
    )
    assert said in " ".join(README.split())


def test_its_length() -> None:
    """A first page: what else there is to say has a page of its own."""
    assert len(README.split()) <= 1300 and README.count("\n") <= 155


def test_every_preset_is_counted() -> None:
    assert f"[{len(PRESETS)} presets](docs/sharding.md#the-presets)" in README


def test_ci_types_its_test_command_with_the_oldest_python() -> None:
    """As .ci/run takes it from the README: with another interpreter, and nothing else changed."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line for line in script.splitlines() if line.startswith("readme_command=")]
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*lines, 'echo "$readme_command"'])],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    shown = next(line for line in README.splitlines() if "-m pytest" in line)
    assert shown.startswith("python3 -m venv") and done.stdout.strip() == shown.replace(
        "python3 ", "python3.11 ", 1
    ), done.stderr


def test_commands_name_no_python_that_a_machine_may_lack() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert not [
        page.name
        for page in pages
        if re.search(r"^python3\.\d+ ", page.read_text(encoding="utf-8"), re.M)
    ]
