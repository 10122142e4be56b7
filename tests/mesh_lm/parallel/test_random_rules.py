"""Random rules equal one device, or are refused with a message; they never give a wrong number, a
crash of XLA or a hang.

Examples run in a separate process, because XLA aborts the process on some programs. A failure shows
the command that reproduces it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from example_runner import Runner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes import ROOT

SCRIPT = ROOT / "tests" / "random_rules.py"
SIZES = (1, 2, 4)
AXES_OF_EXPERTS = ("pipeline", "data", "fsdp", "expert", "tensor")
MESHES = [
    {
        axis: size
        for axis, size in zip(("pipeline", "data", "fsdp", "tensor"), sizes, strict=True)
        if size > 1
    }
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
    """A model, a mesh of up to 8 devices, and a product of presets with up to five rows changed at
    random."""
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
        cut = draw(
            st.lists(
                st.sampled_from(axes if axes and draw(st.integers(0, 9)) else list(mesh)),
                unique=True,
                min_size=1,
                max_size=2,
            )
        )
        rules.setdefault("optimizer", {})["flat"] = cut
        if draw(st.booleans()):  # which the layers gather, mostly as they are kept
            rules.setdefault("params", {})["flat"] = (
                [axis for axis in cut if axis != "pipeline"] if draw(st.integers(0, 4)) else cut[:1]
            )
    microbatches = draw(st.sampled_from((2, 4) if "pipeline" in mesh else (1, 2)))
    return {
        "model": draw(st.sampled_from(("gpt", "llama"))),
        "mesh": mesh,
        "rules": rules,
        "microbatches": microbatches,
    }


EXPERT_MESHES = [
    {axis: size for axis, size in zip(AXES_OF_EXPERTS, sizes, strict=True) if size > 1}
    for sizes in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2))
    if 1 < math.prod(sizes) <= 8
]


@st.composite
def expert_examples(draw: st.DrawFn) -> dict[str, Any]:
    """A mesh, and rules by which experts are on any of its axes, with any exchanges."""
    mesh = draw(st.sampled_from(EXPERT_MESHES))
    likely = [axis for axis in mesh if axis in ("expert", "data", "fsdp")]
    axes = likely if likely and draw(st.integers(0, 4)) else list(mesh)
    experts = draw(st.lists(st.sampled_from(axes), unique=True, max_size=2))
    width = draw(st.sampled_from(([], ["tensor"]))) if "tensor" in mesh else []
    rows = {"experts": experts, "expert_mlp": width}
    rules: dict[str, dict[str, list[str]]] = {"params": dict(rows), "activations": dict(rows)}
    if "fsdp" in experts:
        rules["params"]["embed"] = []
    tensor = draw(st.sampled_from(("megatron", "megatron_sp")))
    exchange = {
        axis: draw(st.sampled_from(("gather", "padded")))
        for axis in experts
        if draw(st.integers(0, 9))
    }
    if draw(st.integers(0, 4)) == 0:
        column = draw(st.sampled_from(COLUMNS))
        row = draw(st.sampled_from(("experts", "expert_mlp", "router", "embed")))
        rules.setdefault(column, {})[row] = draw(
            st.lists(st.sampled_from(list(mesh)), unique=True, max_size=2)
        )
    return {
        "model": "moe",
        "base": f"experts_gather+hsdp+{tensor}",
        "mesh": mesh,
        "rules": rules,
        "exchange": exchange,
        "microbatches": 2,
    }


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    one = Runner(SCRIPT, tmp_path_factory.mktemp("random_rules"))
    yield one
    one.close()


def _settings(count: int) -> settings:
    """The same examples in every run, without shrinking: examples are small, and each takes
    seconds."""
    phases = (Phase.explicit, Phase.generate)
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow],
    )


def _all_are_right_or_refused(
    runner: Runner, count: int, strategy: st.SearchStrategy[dict[str, Any]]
) -> None:
    runner.verdicts.clear()

    @_settings(count)
    @given(strategy)
    def each(example: dict[str, Any]) -> None:
        runner(example)

    each()
    assert runner.verdicts["same"] >= count // 8, f"too few examples ran a step: {runner.verdicts}"


@pytest.mark.slow
def test_random_rules_are_right_or_refused(runner: Runner) -> None:
    _all_are_right_or_refused(runner, 16, examples())


@pytest.mark.slow
def test_random_rules_of_experts_are_right_or_refused(runner: Runner) -> None:
    _all_are_right_or_refused(runner, 12, expert_examples())


@pytest.mark.exhaustive
def test_many_random_rules_of_experts_are_right_or_refused(runner: Runner) -> None:
    _all_are_right_or_refused(runner, 120, expert_examples())


@pytest.mark.exhaustive
def test_many_random_rules_are_right_or_refused(runner: Runner) -> None:
    _all_are_right_or_refused(runner, 400, examples())
