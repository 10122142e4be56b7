"""The grouped matmuls that a mixture of experts will run on a device, derived from a config: tested
before a run of several processes, in which the kernels cannot be tested while they are traced."""

import dataclasses
from pathlib import Path

import pytest

from mesh_lm import distributed
from mesh_lm.config import TrainConfig, TrainLoop, load
from mesh_lm.distributed import gpu
from mesh_lm.model.config import DecoderConfig, SegmentConfig
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.training.expert_kernels import (
    DeviceExperts,
    buffer_rows,
    expert_problems,
    grouped_problems,
)
from mesh_lm.training.own_kernels import HOPPER, agree, examine
from pallas_kernels.grouped.self_test import kind_of
from pallas_kernels.grouped_matmul import choose_trusted_grouped_matmul
from pallas_kernels.trust import VARIABLE, Kind, Verdict, verdict
from sharding_rules import MeshConfig, preset

PASSED = Verdict("passed", "because")
FAILED = Verdict("failed", "because")
H100 = "NVIDIA H100 80GB HBM3"


@dataclasses.dataclass(frozen=True)
class Experts:
    """The names of a config of experts that the kernels' tests read."""

    number: int = 64
    active: int = 4
    d_ff: int = 768
    factor: float = 1.25


@dataclasses.dataclass(frozen=True)
class Mixture(DecoderConfig):
    """A decoder whose last layers have experts."""

    experts: Experts = Experts()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verdict, "_settled", {})
    monkeypatch.setattr(gpu, "visible", lambda environment: H100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


def config(
    mesh: MeshConfig = MeshConfig(data=8),
    params: dict | None = None,
    activations: dict | None = None,
    experts: Experts = Experts(),
    **model,
) -> TrainConfig:
    """A microbatch of 32 sequences of 1,024 tokens. params, activations: further rows of ddp."""
    ddp = preset("ddp")
    rules = dataclasses.replace(
        ddp,
        params={**ddp.params, **(params or {})},
        activations={**ddp.activations, **(activations or {})},
    )
    segments = (SegmentConfig("early", 1), SegmentConfig("late", 3, kind="moe"))
    features = {"d_model": 2048, "n_heads": 16, "n_layers": 4, "segments": segments} | model
    return dataclasses.replace(
        load("llama3_8b"),
        model=Mixture(experts=experts, seq_len=1024, **features),
        train=TrainLoop(global_batch=64, microbatches=2),
        mesh=mesh,
        rules=rules,
    )


def shapes(changed: TrainConfig) -> list[tuple[int, int, int, int]]:
    """(rows, groups, width in, width out)."""
    return [
        (problem.tokens, problem.groups, problem.d_in, problem.d_out)
        for problem in grouped_problems(changed, "gpu", HOPPER)
    ]


def test_a_device_with_all_experts_has_a_row_for_each_of_its_assignments() -> None:
    """32 sequences on 8 devices."""
    assert shapes(config()) == [
        (4 * 1024 * 4, 64, 2048, 2 * 768),
        (4 * 1024 * 4, 64, 768, 2048),
    ]
    halved = [rows for rows, *_ in shapes(config(batch_halves=True))]
    assert halved == [4 * 1024 * 2] * 2


def test_experts_on_several_devices_have_rows_for_each_exchange() -> None:
    """4 devices share 64 experts, and see the tokens of each other: 16 sequences."""
    across = config(
        MeshConfig(data=2, expert=4),
        {"experts": "expert"},
        {"batch": ("data", "expert")},
    )
    worst = 16 * 1024 * 4
    balanced = worst // 4
    rounds = balanced * 5 // 4
    assert {rows for rows, *_ in shapes(across)} == {worst, rounds}
    assert {groups for _, groups, *_ in shapes(across)} == {16}


def test_a_row_of_the_segment_precedes_the_plain_one() -> None:
    mesh = MeshConfig(data=2, expert=4)
    rows = {"late/experts": "expert", "experts": None}
    [groups] = {groups for _, groups, *_ in shapes(config(mesh, rows))}
    assert groups == 16
    [groups] = {groups for _, groups, *_ in shapes(config(mesh, {"early/experts": "expert"}))}
    assert groups == 64


def test_tensor_parallel_experts_are_narrower_and_gather_their_tokens() -> None:
    sharded = config(
        MeshConfig(data=2, tensor=4),
        {"expert_mlp": "tensor"},
        {"seq_resid": "tensor"},
    )
    rows = 16 * 1024 * 4
    assert shapes(sharded) == [(rows, 64, 2048, 2 * 192), (rows, 64, 192, 2048)]


@pytest.mark.parametrize(
    "changed",
    [
        config(MeshConfig(data=-1)),
        config(experts=Experts(number=0)),
        config(segments=()),
        load("llama3_8b"),
        load("gpt_tiny"),
    ],
    ids=["an open mesh", "no experts", "no layers of experts", "llama", "gpt"],
)
def test_nothing_is_known_without_experts_or_sizes(changed: TrainConfig) -> None:
    assert grouped_problems(changed, "gpu", HOPPER) == []


def test_rows_of_a_buffer() -> None:
    """8 of 32 experts, and 1,000 tokens of 4 devices with 2 experts each."""
    device = DeviceExperts(number=8, width=64, ways=4, tokens=1000)
    # 500 are balanced. 625 is rounded to a multiple of 128, or a quarter of it to one of 8.
    assert buffer_rows(device, 32, 2, 1.25) == [640, 2000]
    assert buffer_rows(device, 32, 2, 1.1) == [640, 4 * 144, 2000]
    assert buffer_rows(device, 32, 2, 0) == [2000]
    assert buffer_rows(device._replace(ways=1), 32, 2, 1.25) == [2000]
    one_expert = device._replace(number=1, tokens=4000)
    assert buffer_rows(one_expert, 4, 4, 1.25) == [4000]


def test_the_problems_of_an_mlp() -> None:
    into, out_of = expert_problems(512, 256, 64, 8, "bfloat16", "gpu", HOPPER)
    assert (into.d_in, into.d_out) == (256, 128) and (out_of.d_in, out_of.d_out) == (64, 256)
    assert {into.tokens, out_of.tokens} == {512} and {into.groups, out_of.groups} == {8}


def judging(found: Verdict) -> tuple[list[Kind], object]:
    asked: list[Kind] = []
    return asked, lambda kind: (asked.append(kind), found)[1]


def families(kinds: list[Kind]) -> list[str]:
    return [kind.family for kind in kinds]


def test_both_kernels_are_tested(capsys: pytest.CaptureFixture[str]) -> None:
    asked, judge = judging(PASSED)
    found = examine(config(), judge)
    assert [kind for kind, _ in found] == asked
    assert families(asked) == ["attention", "grouped_matmul", "grouped_matmul"]
    assert set(asked[1:]) == {kind_of(each) for each in grouped_problems(config(), "gpu", HOPPER)}
    assert "testing our grouped_matmul kernel" in capsys.readouterr().out
    asked.clear()
    examine(config(attention="xla"), judge)
    assert families(asked) == ["grouped_matmul", "grouped_matmul"]
    asked.clear()
    examine(config(dtype="float32"), judge)
    assert asked == []


def test_an_open_mesh_is_that_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each has been given its GPUs: JAX has not found them yet."""
    asked, judge = judging(PASSED)
    examine(config(MeshConfig(data=-1)), judge)
    assert families(asked) == ["attention"]
    slot = ProcessSlot("node1:9876", 8, 3, (0,))
    monkeypatch.setattr(ProcessSlot, "of", lambda launch: slot)
    asked.clear()
    examine(config(MeshConfig(data=-1)), judge)
    tested = asked[1:]
    asked.clear()
    examine(config(MeshConfig(data=8)), judge)
    assert tested == asked[1:] and len(tested) == 2


@pytest.mark.parametrize(("other", "name"), [(PASSED, "mosaic"), (FAILED, "xla")])
def test_all_processes_use_what_all_can_trust(
    other: Verdict,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A grouped matmul that failed is no error of a config that names the kernel of attention."""
    named = config(attention="mosaic")
    examined = examine(named, judging(PASSED)[1])
    others = [PASSED if kind.family == "attention" else other for kind, _ in examined]
    rows = [dataclasses.asdict(each) for each in others]
    monkeypatch.setattr(distributed, "gather_from_all", lambda mine: [mine, rows])
    agree(named, examined)
    for problem in grouped_problems(named, "gpu", HOPPER):
        assert choose_trusted_grouped_matmul(problem).name == name
    warned = "warning: our grouped_matmul kernel failed" in capsys.readouterr().out
    assert warned == (name != "mosaic")
