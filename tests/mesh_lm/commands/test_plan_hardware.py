"""`mesh-lm plan --hw` and `--what-if`, and `mesh-lm plan replay`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mesh_lm.commands import plan as plan_command
from mesh_lm.commands import plan_options
from mesh_lm.commands.plan_options import Plan
from mesh_lm.commands.plan_replay import Replayed, show
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.planning.best import hardware_of
from mesh_lm.planning.paper.constants import FITTED
from mesh_lm.planning.paper.layouts import Layouts, layout_of
from mesh_lm.planning.paper.price import _Step
from mesh_lm.planning.paper.sizes import ModelSizes
from mesh_lm.planning.program import compile_config
from mesh_lm.planning.run_cost import RunSize, facts_of
from sharding_rules.lab.machine import Machine
from sharding_rules.lab.prices import collective_us
from sharding_rules.lab.profile import Fit, Measured
from sharding_rules.lab.replayed import Replay
from tests.sharding_rules.lab.test_machine import (
    INSIDE,
    NEGATE,
    gather,
    profile,
    saved,
    written,
)

COMPILE_BUDGET = 2


@pytest.fixture
def report(tmp_path: Path) -> str:
    """The file of a saved plan: a gather of 256 MiB over NVLink, and a kernel."""
    file = tmp_path / "report.json"
    one = saved(gather(1 << 28), NEGATE)
    data = {
        "report": json.loads(one.to_json()),
        "run": {"tokens_per_step": 10**6, "steps": 100},
        "state": {"params": 7},
        "facts": {"speed": "of other hardware"},
    }
    file.write_text(json.dumps(data), encoding="utf-8")
    return str(file)


def test_the_words_of_hardware() -> None:
    plan, _ = plan_options.parse(["gpt_175b", "--hw=a100,nic=100", "--what-if"], "mesh-lm plan")
    assert isinstance(plan, Plan)
    assert (plan.machine.target.name, plan.machine.target.network) == ("a100", 100e9)
    assert Plan("screen", "h200", hw="nic=25").machine.target.name == "h200"
    replayed, config = plan_options.parse(["replay", "r.json", "--hw=nic=25"], "mesh-lm plan")
    assert replayed == Replayed(("r.json",), "nic=25") and config is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hw": "nix=3"}, "--hw=nix: there is no such constant; did you mean 'nic'"),
        ({"target": "a100", "hw": "h200"}, "--target=a100 and --hw=h200 name two devices"),
        ({"target": "h100", "hw": "h200"}, "--target=h100 and --hw=h200 name two devices"),
        ({"what_if": True, "plan": "x.html"}, "x.html: a what-if is drawn to .* .png"),
        ({"plan": "x.png"}, "x.png: the report is a file that ends in .html or .json"),
        ({"what_if": True, "best": True}, "--what-if does not go with --best"),
        ({"what_if": True, "against": "x.json"}, "--against would change nothing beside --what-if"),
        (
            {"what_if": True, "max_microbatch": True},
            "--max-microbatch would change nothing beside --what-if",
        ),
        ({"what_if": True, "tokens": 1e12}, "--tokens would change nothing beside --what-if"),
    ],
)
def test_mistakes_in_a_plan(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**{"plan": "screen", **options})  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "x.png"}, "--output=x.png: the replay is a file that ends in .html or .json"),
        (
            {"output": "x.json", "what_if": True},
            "--output=x.json: the replay is a file that ends in .png",
        ),
        (
            {"measured": (1.0, 2.0)},
            "give each report its own measured step: there are 2 for 1 reports",
        ),
        ({"measured": (0.0,)}, "--measured: expected seconds of a step, above 0"),
        ({"report": ("a.json", "b.json")}, "several reports go with --measured"),
        ({"tokens": -1.0}, "--tokens=-1: expected a number of at least 0"),
        (
            {"measured": (1.0,), "output": "x.html"},
            "--output would change nothing beside --measured: give one of them",
        ),
        ({"measured": (1.0,), "what_if": True}, "--what-if would change nothing beside --measured"),
        ({"measured": (1.0,), "tokens": 1e12}, "--tokens would change nothing beside --measured"),
        ({"what_if": True, "gpu_hour": 2.0}, "--gpu-hour would change nothing beside --what-if"),
    ],
)
def test_mistakes_in_a_replay(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replayed(**{"report": ("a.json",), **options})  # pyright: ignore


def test_a_target_that_is_typed_is_the_device(report: str, tmp_path: Path) -> None:
    """A profile of another is refused, also for a saved report, whose target it has."""
    file = written(tmp_path, profile())
    assert Plan("screen", hw=file).machine.target.name == "h100"
    with pytest.raises(ConfigError, match="and the plan is for h200; add unchecked to --hw"):
        _ = Plan("screen", "h200", hw=file).machine
    unchecked = Plan("screen", "h200", hw=f"unchecked,{file}").machine
    assert unchecked.target.name == "h200" and unchecked.fast.links
    other = written(tmp_path, profile(device="NVIDIA H200"))
    with pytest.raises(ConfigError, match="measured on NVIDIA H200, and the plan is for h100"):
        show(Replayed((report,), other))
    assert show(Replayed((report,), f"unchecked,{other}")) == 0


def test_a_saved_report_on_other_hardware(
    report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(Replayed((report,), "nvlink=100,watts=350", tokens=1e12, gpu_hour=2)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "hardware nvlink 100 GB/s instead of 450 GB/s (--hw); watts 350 W" in text
    assert "1 T tokens" in text and "at 350 W each" in text

    output = str(tmp_path / "slow.json")
    assert show(Replayed((report,), "nvlink=100", output=output)) == 0
    data = json.loads(Path(output).read_text(encoding="utf-8"))
    assert data["state"] == {"params": 7} and data["run"]["steps"] == 100
    assert "of other hardware" not in data["facts"]["speed"]
    # And back: nothing is lost.
    assert show(Replayed((output,), "nvlink=450", output=output)) == 0
    again = json.loads(Path(output).read_text(encoding="utf-8"))["report"]
    before = json.loads(Path(report).read_text(encoding="utf-8"))["report"]
    assert again["timeline"] == before["timeline"]


def test_a_replay_refuses_other_programs(report: str) -> None:
    for words, message in (
        ("h200", "was compiled for h100, not for h200: plan its config"),
        ("node=16", "--hw=node: XLA reads it"),
        ("nic=x", "--hw=nic=x: expected GB/s"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            show(Replayed((report,), words))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"cannot read none\.json"):
        show(Replayed(("none.json",)))


def test_a_what_if_lists_constants_and_draws_them(
    report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "tornado.png"
    assert show(Replayed((report,), what_if=True, output=str(picture))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "predicted, never measured" in lines[0]
    assert lines[2].startswith("nvlink_share") and lines[3].startswith("elementwise")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_what_if_of_what_does_not_fit_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lists the effects, and ends as the plan does."""
    too_large = dataclasses.replace(saved(gather(1 << 28), NEGATE), hbm=1)
    program = SimpleNamespace(compile=lambda options: too_large)
    monkeypatch.setattr(plan_command.Program, "of", lambda *arguments: program)
    with pytest.raises(ConfigError, match=r"GiB on each device and a margin of .* has 0\.0"):
        plan_command.show(Plan("screen", what_if=True), load("gpt_tiny"))
    assert "nvlink_share" in capsys.readouterr().out


def test_a_measured_step_names_the_constants_that_would_explain_it(
    report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link is planted: it reaches a third of NVLink's peak, not 0.78."""
    one = saved(gather(1 << 28), NEGATE)
    slow = Replay(one).on(Machine.of("nvlink_share=0.33"))
    other = saved(gather(1 << 26), NEGATE)
    second = Path(report).with_name("second.json")
    second.write_text(json.dumps({"report": json.loads(other.to_json())}), encoding="utf-8")
    slow_second = Replay(other).on(Machine.of("nvlink_share=0.33"))
    assert slow.timeline and slow_second.timeline
    seconds = (slow.timeline.step / 1e6, slow_second.timeline.step / 1e6)
    assert show(Replayed((report, str(second)), measured=seconds)) == 0
    first = capsys.readouterr().out.splitlines()[2].split()
    assert first[:2] == ["nvlink_share", "0.78"]
    assert float(first[2]) == pytest.approx(0.33, rel=0.02)


def test_cost_and_energy_follow_the_hardware() -> None:
    one = saved(gather(1 << 28), NEGATE)
    run = RunSize(10**6, 100)
    usual = dict(facts_of(run, one, 1e12, 2))["1 T tokens"]
    halved = Replay(one).on(Machine.of("watts=350"))
    assert "at 700 W each" in usual
    assert "at 350 W each" in dict(facts_of(run, halved, 1e12, 2))["1 T tokens"]


def test_the_planners_formulas_take_the_changed_constants() -> None:
    usual = hardware_of("h100")
    changed = hardware_of(Machine.of("nic=25,nvlink_share=0.39,node=72"))
    assert changed.network == pytest.approx(usual.network / 2)
    assert changed.nvlink == pytest.approx(usual.nvlink / 2)
    assert (changed.node, changed.matmul) == (72, usual.matmul)


MEASURED = (
    Measured("all-gather", "tensor", 8, 1, Fit(40.0, 100e9, 0.01), ()),
    Measured("all-gather", "data", 16, 2, Fit(90.0, 80e9, 0.01), ()),
    Measured("all-reduce", "data", 32, 4, Fit(70.0, 120e9, 0.01), ()),
    Measured("collective-permute", "pipeline", 2, 2, Fit(30.0, 5e9, 0.01), ()),
)


@pytest.mark.parametrize("word", ["", "nvlink=20", "nic=5", "start_us=200", "nic_step_us=90"])
def test_the_formulas_price_collectives_as_a_plan_does(word: str, tmp_path: Path) -> None:
    """With a profile, and with constants that come after it."""
    machine = Machine.of(f"{written(tmp_path, profile(collectives=MEASURED))},{word}")
    hardware = hardware_of(machine)
    sizes = ModelSizes.of(load("llama3_8b"))
    assert sizes is not None
    step = _Step(sizes, Layouts.of([]), hardware, FITTED)
    n_bytes = float(1 << 28)
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        for ways in (4, 8, 16, 64):
            rounds = 2 if kind == "all-reduce" else 1
            collective = dataclasses.replace(
                INSIDE,
                kind=kind,
                group=ways,
                nodes=max(1, ways // 8),
                wire=rounds * n_bytes * (ways - 1) / ways,
            )
            paper = step._collective(np.array([n_bytes]), np.array([ways]), np.array([1]), kind)
            us = collective_us(collective, machine.target, machine.fast)
            assert 1e6 * paper[0] == pytest.approx(us), (kind, ways)
    group = (np.array([n_bytes]), np.array([8]), np.array([1]))
    gather = step._collective(*group, "all-gather")[0]
    scatter = step._collective(*group, "reduce-scatter")[0]
    mean = step._collective(*group, "all-gather", "reduce-scatter")[0]
    assert mean == pytest.approx((gather + scatter) / 2)
    # Between stages: eight or more devices apart they are in different nodes.
    row = layout_of(load("llama3_8b"), 64)
    assert row is not None
    far = Layouts.of([{**row, "pipeline": 2.0, "data": 8.0, "fsdp": 4.0}])
    hop = _Step(sizes, far, hardware, FITTED)._hop(np.array([n_bytes]))
    send = dataclasses.replace(INSIDE, kind="collective-permute", group=2, nodes=2, wire=n_bytes)
    assert 1e6 * hop[0] == pytest.approx(collective_us(send, machine.target, machine.fast))


def test_without_a_profile_the_formulas_have_the_assumed_latencies() -> None:
    """To the last bit: what was fitted with them stays."""
    usual = hardware_of("h100")
    fields = {field.name: field.default for field in dataclasses.fields(usual)}
    for name in ("kernel", "start", "start_between_nodes", "nvlink_step", "network_step"):
        assert getattr(usual, name) == fields[name], name
    assert usual.measured == {}
    changed = hardware_of(Machine.of("start_us=80,kernel_us=3"))
    assert (changed.start, changed.kernel) == (80e-6, 3e-6)


@pytest.mark.deviceless
@pytest.mark.slow
def test_nodes_of_another_size_are_compiled() -> None:
    """Eight GPUs in nodes of four: what spans two nodes takes the network."""
    config = load("gpt_tiny")
    whole = compile_config(config, "h100", 8)
    halves = compile_config(config, Machine.of("node=4"), 8)
    assert {one.nodes for one in whole.collectives} == {1}
    assert {one.nodes for one in halves.collectives} == {2}
    assert halves.timeline and whole.timeline
    assert halves.timeline.step > whole.timeline.step
    # The links are not compiled: a replay is the plan itself.
    slow = compile_config(config, Machine.of("nvlink=45"), 8)
    assert Replay(whole).on(Machine.of("nvlink=45")) == slow
