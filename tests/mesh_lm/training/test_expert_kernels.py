"""The grouped matmuls that a mixture of experts will run on a device, derived from a config: tested
before a run of several processes, in which the kernels cannot be tested while they are traced."""

import dataclasses
from pathlib import Path

import jax
import pytest
from support import BATCH, SEQ, VOCAB, host_batch, on_devices, shard_on

from mesh_lm import distributed
from mesh_lm.config import PipelineConfig, TrainConfig, TrainLoop, load
from mesh_lm.distributed import gpu
from mesh_lm.model import DecoderConfig, SegmentConfig, moe
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training.expert_kernels import DeviceExperts, expert_problems, grouped_problems
from mesh_lm.training.own_kernels import HOPPER, agree, examine
from pallas_kernels import grouped_matmul
from pallas_kernels.grouped.self_test import kind_of
from pallas_kernels.grouped_matmul import choose_trusted_grouped_matmul
from pallas_kernels.trust import VARIABLE, Kind, Verdict, verdict
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 2

EXPERTS = ExpertsConfig(number=64, active=4, d_ff=768)
PASSED = Verdict("passed", "because")
FAILED = Verdict("failed", "because")
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verdict, "_settled", {})
    monkeypatch.setattr(gpu, "visible", lambda environment: H100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


def config(
    mesh: MeshConfig = MeshConfig(data=8),
    rules: str = "ddp",
    experts: ExpertsConfig = EXPERTS,
    **model,
) -> TrainConfig:
    """A microbatch of 32 sequences of 1,024 tokens; the last three layers have experts."""
    segments = (SegmentConfig("early", 1), SegmentConfig("late", 3, kind="moe"))
    features = {
        "segments": segments,
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 4,
        "seq_len": 1024,
    } | model
    return dataclasses.replace(
        load("llama3_8b"),
        model=DecoderConfig(experts=experts, **features),
        train=TrainLoop(global_batch=64, microbatches=2),
        mesh=mesh,
        rules=preset(rules),
    )


def shapes(changed: TrainConfig) -> list[tuple[int, int, int, int]]:
    """(rows, experts, width in, width out)."""
    return [
        (problem.tokens, problem.groups, problem.d_in, problem.d_out)
        for problem in grouped_problems(changed, "gpu", HOPPER)
    ]


def test_a_device_with_all_experts_has_a_row_for_each_of_its_choices() -> None:
    """32 sequences on 8 devices."""
    rows = 4 * 1024 * 4
    assert shapes(config()) == [(rows, 64, 2048, 768), (rows, 64, 768, 2048)]
    assert shapes(config(batch_halves=True))[0] == (rows // 2, 64, 2048, 768)
    assert shapes(config(activation="swiglu"))[0] == (rows, 64, 2048, 2 * 768)


def test_experts_of_several_devices_have_the_rows_of_a_round() -> None:
    """1.25 times those that balanced routing fills, or those of the worst."""
    mesh = MeshConfig(data=2, expert=4)
    balanced = 4 * 1024 * 4
    assert shapes(config(mesh, "ddp+experts_gather"))[0] == (balanced * 5 // 4, 16, 2048, 768)
    assert shapes(config(mesh, "ddp+experts_padded"))[0] == (balanced * 5 // 4, 16, 2048, 768)
    worst = dataclasses.replace(EXPERTS, factor=0.0)
    assert shapes(config(mesh, "ddp+experts_gather", worst))[0][0] == 4 * balanced


def test_tensor_parallel_experts_are_narrower_and_gather_their_tokens() -> None:
    sharded = config(MeshConfig(data=2, tensor=4), "megatron_sp")
    rows = 16 * 1024 * 4
    assert shapes(sharded) == [(rows, 64, 2048, 192), (rows, 64, 192, 2048)]


@pytest.mark.parametrize(
    ("mesh", "rules", "halves"),
    [
        (MeshConfig(data=8), "ddp", False),
        (MeshConfig(fsdp=4, expert=2), "fsdp+experts_gather", False),
        (MeshConfig(expert=4, tensor=2), "megatron+experts_padded", True),
        (MeshConfig(expert=2, tensor=2, data=2), "megatron_sp+experts_gather", False),
    ],
    ids=["data", "fsdp", "tensor, halves", "sequence-parallel"],
)
def test_what_was_tested_is_what_each_device_multiplies(
    mesh: MeshConfig, rules: str, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes that a training step is traced with."""
    experts = ExpertsConfig(number=8, active=2, d_ff=64)
    small = dataclasses.replace(
        config(
            mesh,
            rules,
            experts,
            d_model=32,
            n_heads=4,
            vocab_size=VOCAB,
            seq_len=SEQ,
            batch_halves=halves,
        ),
        train=TrainLoop(global_batch=BATCH, microbatches=2),
    )
    seen = set()

    def recorded(x: jax.Array, w: jax.Array, sizes: jax.Array, **options: int) -> jax.Array:
        seen.add((len(x), *w.shape))
        return grouped_matmul(x, w, sizes, **options)

    monkeypatch.setattr(moe, "grouped_matmul", recorded)
    sizes = {axis: size for axis, size in mesh.sizes().items() if size > 1}
    layout = ModelLayout.of(small.model, shard_on(rules, **sizes), PipelineConfig())
    batch = on_devices(host_batch(2), layout)
    jax.eval_shape(engine.value_and_grad(layout), layout.shapes, batch, jax.random.key(3))
    assert seen == set(shapes(small))


@pytest.mark.parametrize(
    "changed",
    [config(MeshConfig(data=-1)), config(segments=()), load("llama3_8b"), load("gpt_tiny")],
    ids=["an open mesh", "no layers of experts", "llama", "gpt"],
)
def test_nothing_is_known_without_experts_or_sizes(changed: TrainConfig) -> None:
    assert grouped_problems(changed, "gpu", HOPPER) == []


def test_the_problems_of_an_mlp() -> None:
    device = DeviceExperts(rows=512, number=8, width=64)
    into, out_of = expert_problems(device, 256, "bfloat16", "gpu", HOPPER, is_gated=True)
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
