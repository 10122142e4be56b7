"""What a run does about our own kernels: tested before a device is used, agreed between processes,
and described in the log."""

import dataclasses
from pathlib import Path

import jax
import pytest

from mesh_lm import distributed
from mesh_lm.config import DataConfig, TrainConfig, load
from mesh_lm.distributed import gpu
from mesh_lm.errors import ConfigError
from mesh_lm.training import loop, own_kernels
from mesh_lm.training.own_kernels import HOPPER, agree, attention_problems, described, examine
from pallas_kernels import Choice, choose_attention, choose_trusted_attention
from pallas_kernels.attention.self_test import kind_of
from pallas_kernels.trust import VARIABLE, Kind, Verdict, verdict
from sharding_rules import MeshConfig, preset

H100 = "NVIDIA H100 80GB HBM3"
PASSED, FAILED, UNTESTED = (
    Verdict(status, "because") for status in ("passed", "failed", "untested")
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verdict, "_settled", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "visible", lambda environment: H100)


def config(name: str = "llama3_8b", **model) -> TrainConfig:
    loaded = load(name)
    return dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, **model))


def judging(found: Verdict) -> tuple[list[Kind], object]:
    asked: list[Kind] = []
    return asked, lambda kind: (asked.append(kind), found)[1]


def test_each_kind_of_layer_is_tested_once(
    hopper: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, judge = judging(PASSED)
    assert examine(config(window=(1024, 0, 1024)), judge) == [(kind, PASSED) for kind in asked]
    assert [kind.values["window"] for kind in asked] == [100, None]
    assert capsys.readouterr().out.startswith(
        f"testing our attention kernel on {H100} before its first use"
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("", {}),
        ("NVIDIA A100-SXM4-80GB", {}),
        (H100, {"attention": "xla"}),
        (H100, {"dtype": "float32"}),
        (H100, {"head_dim": 80}),
    ],
)
def test_nothing_is_tested_that_the_run_does_not_use(
    name: str, model: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "visible", lambda environment: name)
    asked, judge = judging(PASSED)
    assert examine(config(**model), judge) == [] and not asked


def test_a_run_tests_them_before_it_uses_a_device_and_then_agrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    class Stop(Exception):
        """Ends the run before it makes its mesh."""

    def agreed(config: TrainConfig, examined: list) -> None:
        happened.append(f"agree on {examined}")
        raise Stop

    monkeypatch.setattr(distributed, "start", lambda *_, **__: happened.append("start"))
    monkeypatch.setattr(
        own_kernels, "examine", lambda config: happened.append("examine") or ["verdicts"]
    )
    monkeypatch.setattr(jax, "device_count", lambda: happened.append("devices") or 1)
    monkeypatch.setattr(own_kernels, "agree", agreed)
    with pytest.raises(Stop):
        loop.train(load("gpt_tiny"))
    assert [happened[0], happened[1], happened[-1]] == ["start", "examine", "agree on ['verdicts']"]
    assert "devices" in happened[2:-1]


def test_a_config_that_cannot_run_is_left_to_its_check(hopper: None) -> None:
    assert examine(config(n_heads=0), judging(PASSED)[1]) == []


def test_a_wrong_policy_is_a_users_mistake(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(
        ConfigError,
        match="MESH_LM_TRUST_KERNELS must be unset or one of test, always, never, got 'maybe'",
    ):
        examine(config(), judging(PASSED)[1])


def test_what_was_tested_is_what_each_device_runs(hopper: None) -> None:
    """Under tensor parallelism a device has fewer heads, and may have its kv heads from others."""
    for tensor, heads in {1: (32, 8), 8: (4, 1), 16: (2, 1), 32: (1, 1)}.items():
        sharded = dataclasses.replace(
            config(), mesh=MeshConfig(data=-1, tensor=tensor), rules=preset("megatron")
        )
        shapes = [
            (problem.q_shape[2], problem.k_shape[2])
            for problem in attention_problems(sharded, "gpu", HOPPER)
        ]
        assert shapes == [heads]


def test_the_backward_pass_that_a_ring_calls_is_tested(hopper: None) -> None:
    """It returns sums that are not rounded, by other code than a gradient of the whole."""
    sharded = dataclasses.replace(
        config(), mesh=MeshConfig(data=1, sequence=8), rules=preset("ring")
    )
    problems = attention_problems(sharded, "gpu", HOPPER)
    assert [problem.unrounded for problem in problems] == [False, True, False, True]
    assert len({kind_of(problem) for problem in problems}) == 4


def several(monkeypatch: pytest.MonkeyPatch, *others: list[Verdict]) -> None:
    """Makes this process one of several, of which the others have these verdicts."""
    rows = [[dataclasses.asdict(each) for each in row] for row in others]
    monkeypatch.setattr(distributed, "gather_from_all", lambda mine: [mine, *rows])


@pytest.mark.parametrize(
    ("others", "name"),
    [
        ([[PASSED]], "mosaic"),
        ([[FAILED]], "cudnn"),
        ([[PASSED], [UNTESTED]], "cudnn"),
        ([[]], "cudnn"),
    ],
)
def test_all_processes_use_what_all_can_trust(
    others: list,
    name: str,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    several(monkeypatch, *others)
    agree(config(), examine(config(), judging(PASSED)[1]))
    (problem,) = attention_problems(config(), "gpu", HOPPER)
    assert choose_trusted_attention(problem).name == name
    assert ("warning: our attention kernel" in capsys.readouterr().out) == (name != "mosaic")


def test_a_kernel_that_was_asked_for_by_name_and_failed_is_an_error(hopper: None) -> None:
    named = config(attention="mosaic")
    agree(named, examine(named, judging(PASSED)[1]))
    with pytest.raises(ConfigError) as error:
        agree(named, examine(named, judging(UNTESTED)[1]))
    assert str(error.value) == (
        "model.attention=mosaic: our attention kernel is not used, because it has not passed its "
        "self-test on this GPU: because; set model.attention=auto, or MESH_LM_TRUST_KERNELS=always "
        "to use it all the same"
    )


def lines(
    changed: TrainConfig, capability: tuple[int, int] | None, platform: str = "gpu"
) -> list[str]:
    automatic = changed.model.attention == "auto"
    problems = attention_problems(changed, platform, capability) if automatic else []
    return described(changed, [choose_attention(problem) for problem in problems], capability)


def test_a_line_says_what_serves_and_why_nothing_better_does() -> None:
    assert lines(config(), HOPPER) == ["attention: mosaic (model.attention=auto)"]
    assert lines(config(), None, "cpu") == ["attention: xla (model.attention=auto)"]
    packed = dataclasses.replace(config(), data=DataConfig(documents="packed"))
    assert lines(packed, (8, 0)) == [
        "attention: xla (model.attention=auto); not mosaic, because it needs compute capability "
        "9.0, and this GPU has 8.0; not cudnn, because jax has no packed documents for it (only a "
        "length per row), so no segment_ids"
    ]


def test_xla_on_hopper_is_a_warning() -> None:
    said = lines(config(dtype="float32"), HOPPER)
    assert len(said) == 2
    assert (
        said[1]
        == "warning: attention runs in plain XLA on this Hopper GPU, without a kernel (see above)"
    )
    assert lines(config(attention="xla"), HOPPER) == [
        "attention: xla (model.attention=xla)",
        "warning: attention runs in plain XLA on this Hopper GPU, without a kernel "
        "(model.attention=xla; auto takes a kernel where one can serve the model)",
    ]


def test_a_failure_is_in_the_line() -> None:
    choice = Choice("cudnn", {"mosaic": "it did not finish within 60 s"})
    assert own_kernels.described(config(), [choice], HOPPER) == [
        "attention: cudnn (model.attention=auto); not mosaic, because it did not finish within 60 s"
    ]
