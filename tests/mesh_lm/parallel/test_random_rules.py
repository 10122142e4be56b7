"""Random rules equal one device, or are refused with a message; they never give a wrong number, a crash of XLA or a hang.

Examples run in a separate process, because XLA aborts the process on some programs. A failure shows the command that reproduces it.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes import PATIENCE, ROOT, environment

SCRIPT = ROOT / "tests" / "random_rules.py"
SIZES = (1, 2, 4)
MESHES = [
    {axis: size for axis, size in zip(("pipeline", "data", "fsdp", "tensor"), sizes, strict=True) if size > 1}
    for sizes in itertools.product((1, 2), SIZES, SIZES, SIZES)
    if 1 < math.prod(sizes) <= 8
]
ROWS = {
    "params": ("vocab", "embed", "heads", "kv_heads", "mlp", "position", "norm", "fused", "layers"),
    "activations": ("batch", "seq_resid", "heads", "kv_heads", "mlp", "vocab", "fused", "head_dim"),
}
COLUMNS = ("params", "activations", "gathered", "gradients", "optimizer")


@st.composite
def examples(draw: st.DrawFn) -> dict[str, Any]:
    """A model, a mesh of up to 8 devices, and a product of presets with up to five rows changed at random."""
    mesh = draw(st.sampled_from(MESHES))
    rules: dict[str, dict[str, list[str]]] = {}
    # These leave fsdp free for other rows: most examples would be refused otherwise.
    if draw(st.booleans()):
        rules["params"] = {"embed": []}
    if draw(st.integers(0, 2)) == 0:
        rules["activations"] = {"batch": ["data"]}
    for column in draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=5)):
        row = draw(st.sampled_from(ROWS.get(column, ROWS["params"])))
        likely = [axis for axis in mesh if axis in ("fsdp", "tensor")]
        axes = likely if likely and draw(st.integers(0, 9)) else list(mesh)
        cut = draw(st.lists(st.sampled_from(axes), unique=True, max_size=3))
        rules.setdefault(column, {})[row] = cut
        if column == "params" and row in ROWS["activations"] and draw(st.booleans()):
            rules.setdefault("activations", {})[row] = cut
    if draw(st.integers(0, 2)) == 0:  # flat vectors, mostly over axes that may shard them
        axes = [axis for axis in mesh if axis in ("pipeline", "data")]
        cut = draw(st.lists(st.sampled_from(axes if axes and draw(st.integers(0, 9)) else list(mesh)), unique=True, min_size=1, max_size=2))
        rules.setdefault("optimizer", {})["flat"] = cut
        if draw(st.booleans()):  # which the layers gather, mostly as they are kept
            rules.setdefault("params", {})["flat"] = [axis for axis in cut if axis != "pipeline"] if draw(st.integers(0, 4)) else cut[:1]
    microbatches = draw(st.sampled_from((2, 4) if "pipeline" in mesh else (1, 2)))
    return {"model": draw(st.sampled_from(("gpt", "llama"))), "mesh": mesh, "rules": rules, "microbatches": microbatches}


class Runner:
    """The process that runs examples, restarted after an example that killed it."""

    def __init__(self, directory: Path) -> None:
        self.said = directory / "stderr"
        self.process: subprocess.Popen[str] | None = None
        self.verdicts = collections.Counter[str]()

    def __call__(self, example: dict[str, Any]) -> None:
        """Raises AssertionError for an example that is neither refused nor correct."""
        line = json.dumps(example)
        verdict, text = self._answer(line)
        if verdict in ("hung", "aborted"):  # on few cores, XLA:CPU's collectives sometimes starve each other and time out
            verdict, text = self._answer(line)
        self.verdicts[verdict] += 1
        assert verdict in ("same", "refused"), f"{verdict}: {text}\nPYTHONPATH=tests:. python tests/{SCRIPT.name} '{line}'"

    def _answer(self, line: str) -> tuple[str, str]:
        if self.process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.said.open("w", encoding="utf-8")}
            environ = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}") | {"XLA_FLAGS": ""}
            environ["XLA_FLAGS"] = f"{environment()['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
            self.process = subprocess.Popen([sys.executable, str(SCRIPT)], text=True, env=environ, **pipes)
        process = self.process
        assert process.stdin and process.stdout
        process.stdin.write(line + "\n")
        process.stdin.flush()
        alarm = threading.Timer(PATIENCE, process.kill)
        alarm.start()
        answer = next((each for each in process.stdout if each.startswith("\0")), "")
        hung = not alarm.is_alive()
        alarm.cancel()
        if answer:
            verdict, text = json.loads(answer[1:])
            return verdict, text
        process.kill()
        process.wait()
        self.process = None
        return "hung" if hung else "aborted", self.said.read_text(encoding="utf-8")[-3000:]

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    one = Runner(tmp_path_factory.mktemp("random_rules"))
    yield one
    one.close()


def _settings(count: int) -> settings:
    """The same examples in every run, without shrinking: examples are small, and each takes seconds."""
    phases = (Phase.explicit, Phase.generate)
    return settings(max_examples=count, derandomize=True, database=None, phases=phases, suppress_health_check=[HealthCheck.too_slow])


def _all_are_right_or_refused(runner: Runner, count: int) -> None:
    runner.verdicts.clear()

    @_settings(count)
    @given(examples())
    def each(example: dict[str, Any]) -> None:
        runner(example)

    each()
    assert runner.verdicts["same"] >= count // 8, f"too few examples ran a step: {runner.verdicts}"


@pytest.mark.slow
def test_random_rules_are_right_or_refused(runner: Runner) -> None:
    _all_are_right_or_refused(runner, 16)


@pytest.mark.exhaustive
def test_many_random_rules_are_right_or_refused(runner: Runner) -> None:
    _all_are_right_or_refused(runner, 400)
