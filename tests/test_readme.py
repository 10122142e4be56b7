"""The README's experiment, taken from the README itself; and its table of presets, from the rules."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, bare
from runnable import READER

from benchmarks import plan_page
from mesh_lm.optim.flat import FLAT
from sharding_rules import PRESETS, axes_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.deviceless
def test_the_experiment(reports: str, tmp_path: Path) -> None:
    """As a reader runs it: in a file of their own, by pytest, with nothing in the environment. CI does so with the installed wheel."""
    block = re.search(r"```python\n(.*?)```", README, re.S)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line]) <= 12
    (tmp_path / "test_mine.py").write_text(block[1], encoding="utf-8")
    command = [READER or sys.executable, "-m", "pytest", "-q", str(tmp_path / "test_mine.py")]
    environment = bare(HOME=str(Path(reports).parent))  # where the config keeps what is compiled
    done = subprocess.run(command, cwd=tmp_path if READER else ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_plan_of_gpt_175b() -> None:
    """The numbers beside the picture are those of docs/configs.md's raw results."""
    rows = json.loads(plan_page.newest().read_text(encoding="utf-8"))["tables"]["Configs"]["rows"]
    (row,) = [row for row in rows if row["name"] == "gpt_175b"]
    said = (
        f"GPT-3's {row['parameters'] / 1e9:.1f} B parameters on {row['devices']:,} H100s need {row['peak_gib']:.1f} GiB of the "
        f"{row['usable_gib']:.1f} that a run may take of each, and send {row['sent over tensor, GiB']:.1f} GiB over NVLink and "
        f"{row['sent_gib'] - row['sent over tensor, GiB']:.1f} over the network in a step (exact); "
        f"a step takes {row['step_s']:.1f} s (predicted, never measured)"
    )
    assert said in " ".join(README.split())


def test_the_table_of_presets() -> None:
    rows = {
        cells[0].split("`")[1]: cells
        for line in README.splitlines()
        if line.startswith("| `") and (cells := [c.strip() for c in line.strip("|").split("|")])
    }
    assert rows.keys() == PRESETS.keys()
    for name, (_, weights, gradients, moments, batch, _) in rows.items():
        rules = PRESETS[name]
        flat = rules.column("optimizer").get(FLAT) is not None  # then gradients are sharded like the optimizer state
        for kind, cell in (("params", weights), ("optimizer" if flat else "gradients", gradients), ("optimizer", moments)):
            used = {axis for entry in rules.column(kind).values() for axis in axes_of(entry)} - {"pipeline"}  # in every preset
            assert cell == (" x ".join(sorted(used)) or "replicated"), f"{name}: {kind}"
        assert batch == " x ".join(axes_of(rules.activations["batch"]))
