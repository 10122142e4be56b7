"""The commands of gpu_hour.md: their time, their parts, and the image in which they are rehearsed."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import PATIENCE, ROOT

COMPILE_BUDGET = 0
NOT_IN_THE_HOUR = {"losses", "resume", "rerun", "layouts"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return {name: importlib.import_module(name) for name in ("rehearse", "gpu_suite", "gpu_truth", "gpu_training")}


@pytest.fixture
def page() -> str:
    return (ROOT / "benchmarks" / "gpu_hour.md").read_text()


def test_the_commands_fit_their_time(modules: dict[str, ModuleType], page: str) -> None:
    """A command's limit covers its parts, and is at most ten minutes; all together are 30 to 45 minutes."""
    found = modules["rehearse"].commands(page)
    assert len(found) == page.count("```command")
    for command in found:
        assert command.words[0] == "python" and (ROOT / command.script).exists()
        assert "--resume" in command.words and "--output=$RESULTS" in command.words
        suite: Any = modules[Path(command.script).stem]
        parts = [*suite.PARTS, *getattr(suite, "BY_NAME", ())]
        seconds = [part.seconds for part in parts if not command.parts or part.run.__name__ in command.parts]
        assert len(seconds) == len(command.parts or parts)
        assert 0.8 * command.seconds <= sum(seconds) <= command.seconds - 20, command
        assert command.seconds <= 600
    assert 30 * 60 <= sum(command.seconds for command in found) <= 45 * 60


def test_every_part_is_in_one_command(modules: dict[str, ModuleType], page: str) -> None:
    suite = modules["gpu_suite"]
    named = [part for command in modules["rehearse"].commands(page) for part in command.parts]
    assert sorted(named) == sorted({part.run.__name__ for part in (*suite.PARTS, *suite.BY_NAME)} - NOT_IN_THE_HOUR)
    assert named[:3] == ["smoke", "autotune", "headline"]


def test_the_wheels_are_those_that_the_image_lacks(modules: dict[str, ModuleType], page: str) -> None:
    (block,) = re.findall(r"```wheels\n(.+?)```", page, re.DOTALL)
    wheels = {word.partition("==")[0].replace("-", "_") for word in block.partition("-d wheels")[2].split() if word != "\\"}
    assert wheels == set(modules["rehearse"].LACKING)
    needed = set(modules["gpu_training"].NEEDED_BY_TRAIN) - {"tokenizers", "matplotlib"}  # of the image
    assert needed <= wheels


def test_the_image_hides_packages_from_imports_and_from_questions(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    code = """
import importlib.util, json
found = {name: importlib.util.find_spec(name) is not None for name in ("grain", "tyro", "jax", "numpy")}
try:
    import tyro
except ModuleNotFoundError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
    environment = modules["rehearse"].image(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=PATIENCE, check=True)
    assert json.loads(done.stdout) == {"grain": False, "tyro": False, "jax": True, "numpy": True, "error": "No module named 'tyro'"}


@pytest.mark.slow
def test_a_command_is_rehearsed_in_the_image(tmp_path: Path) -> None:
    """The first command, which has the kernels."""
    command = [sys.executable, "benchmarks/rehearse.py", "--only=1", f"--results={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok, " in done.stdout and "FAILED" not in done.stdout
