"""The options of --plan, and the results that need no compilation."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_report import report

import train
from mesh_lm.commands.plan import refusal
from mesh_lm.commands.plan_options import Plan, parse, parse_either
from mesh_lm.config import TrainConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.planning.changes import candidates
from mesh_lm.planning.microbatch import largest_microbatch
from mesh_lm.planning.program import devices_for
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.fixes import Candidate, rank
from sharding_rules.lab.report import LabError


def test_the_words_of_a_plan_are_told_from_the_runs() -> None:
    words = ["--config=configs/gpt_175b.py", "--config.model.n_layers", "2", "--output=runs/mine"]
    plan, config = parse_either(words)
    assert plan is None
    assert config.model.n_layers == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert config.output == "runs/mine"
    screen = (Plan("screen"), config)
    assert parse_either([*words, "--plan"]) == screen
    assert parse_either(["--plan", *words]) == screen
    assert parse_either(["--plan", "configs/gpt_175b.py", *words[1:]]) == screen
    assert parse_either(["--plan", "report.html", *words]) == (Plan("report.html"), config)
    options = ["--target=h200", "--devices", "1024", "--max-microbatch", "--flags=overlap"]
    expected = Plan("report.html", "h200", 1024, max_microbatch=True, flags="overlap")
    assert parse_either(["--plan=report.html", *words, *options]) == (expected, config)


def test_a_plan_by_its_own_command() -> None:
    """There --output is the report's; the run's is --config.output."""
    words = "gpt_tiny --devices=8 --output=report.html --config.output=runs/mine --rules=fsdp"
    plan, config = parse(words.split(), "mesh-lm plan")
    assert plan == Plan("report.html", devices=8)
    assert config.output == "runs/mine"
    assert config.rules.name == "fsdp"
    assert parse([], "mesh-lm plan")[0] == Plan("screen")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--devices=8"],
            "--devices=8 goes with --plan: python train.py --config=FILE --plan --devices=8",
        ),
        (
            ["--plan", "--target=h10"],
            "--target=h10: expected one of the targets h100, h200, a100, b200",
        ),
        (
            ["--plan=report.pdf"],
            (
                "report.pdf: the report is a file that ends in .html or .json; without a file it "
                "goes to the screen"
            ),
        ),
        (["--plan", "--devices=-1"], "--devices=-1: a plan is for at least 1 device"),
        (
            ["--plan", "--flags=fast"],
            "--flags=fast: expected one of the sets of flags auto, default",
        ),
        (["--plan", "--devices=many"], "--devices=many: expected int"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train.main(words)
    assert message in str(caught.value)


def test_a_config_that_cannot_run_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(
        ConfigError, match=r"mesh has 64 x \? devices .* but the number of visible devices is 96"
    ):
        train.main(["--config=configs/gpt_175b.py", "--plan", "--devices=96"])


def candidate_texts(config: TrainConfig, n_devices: int) -> set[str]:
    return {candidate.text for candidate in candidates(config, n_devices, pytest.fail)}


def test_changes_are_of_every_kind_and_all_can_run() -> None:
    config = check(load("configs/llama3_8b.py"), 8)
    compiled = []
    changes = list(candidates(config, 8, compiled.append))
    kinds = {change.kind for change in changes if not change.parts}
    assert kinds == {"remat", "offload", "microbatch", "mesh", "loss", "host"}
    fewer = next(change for change in changes if change.kind == "microbatch")
    assert "--config.train.microbatches=" in fewer.text
    assert len({change.text for change in changes}) == len(changes)
    changes[0].compile()
    (changed,) = compiled
    assert changed != config
    assert check(changed, 8) == changed

    assert "--config.rules=zero1" in candidate_texts(load("configs/gpt2_124m.py"), 8)
    zero2 = replace(
        load("configs/megatron_16b.py"),
        rules=preset("zero2+megatron_sp"),
        mesh=MeshConfig(data=48, tensor=4),
    )
    assert "--config.rules=distributed+megatron_sp" in candidate_texts(zero2, 192)


def test_changes_of_rules_keep_the_type_of_sums() -> None:
    config = replace(
        load("configs/llama3_8b.py"),
        rules=preset("hsdp+reduce_float32"),
        mesh=MeshConfig(data=2, fsdp=4),
    )
    compiled = []
    changes = [c for c in candidates(config, 8, compiled.append) if "rules" in c.text]
    texts = {change.text for change in changes}
    assert "--config.rules=hsdp+reduce_float32 --config.mesh.data=1 --config.mesh.fsdp=8" in texts
    assert (
        "--config.rules=hsdp+reduce_float32+megatron_sp --config.mesh.data=1 --config.mesh.tensor=2"
        in texts
    )
    for change in changes:
        change.compile()
    assert {config.rules.reduction for config in compiled} == {"float32"}


@pytest.mark.parametrize(
    ("mesh", "option", "n_devices"),
    [
        ({"data": -1, "fsdp": 16, "tensor": 8}, 0, 128),
        ({"data": -1}, 0, 8),
        ({"data": -1, "tensor": 3}, 0, 24),
        ({"data": 2}, 0, 2),
        ({"data": 2}, 4, 4),
    ],
)
def test_how_many_devices_a_plan_is_for(mesh: dict[str, int], option: int, n_devices: int) -> None:
    config = replace(load("configs/gpt2_124m.py"), mesh=MeshConfig(**mesh))
    assert devices_for(config, option) == n_devices


def test_refusal_names_what_is_in_the_way_and_what_helps() -> None:
    fitting = report()
    tight = replace(fitting, hbm=int(fitting.peak_bytes * 0.9))
    half: Any = SimpleNamespace(
        peak_bytes=tight.peak_bytes // 2, fits=True, timeline=None, host_bytes=0
    )
    same: Any = SimpleNamespace(
        peak_bytes=tight.peak_bytes, fits=False, timeline=None, host_bytes=0
    )

    def fail() -> NoReturn:
        raise LabError("no")

    fixes = rank(
        tight,
        [
            Candidate("remat", "--a", lambda: half),
            Candidate("rule", "--b", lambda: same),
            Candidate("mesh", "--c", fail),
        ],
    )
    assert [fix.text for fix in fixes] == ["--a"], (
        "what saves nothing, or does not compile, is no fix"
    )
    message = refusal(tight, fixes)
    largest = fitting.memory.buffers[0]
    assert f"in the way: {largest.bytes / 2**30:.2f} GiB of {largest.kind}" in message
    assert "--a: " in message
    assert "on each device and a margin of 5%, and h100 has" in message
    assert message.endswith("it fits")


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 2), st.integers(1, 1000))
def test_the_largest_microbatch_fits_and_one_more_does_not(
    base: int, slope: int, bend: int, limit: int
) -> None:
    def peak(b: int) -> int:
        return base + slope * b + bend * b * b

    def compiled(config: TrainConfig) -> Any:
        b = config.train.global_batch // 2
        tried.append(b)
        return SimpleNamespace(peak_bytes=peak(b), limit=limit, fits=peak(b) <= limit)

    tried: list[int] = []
    facts = largest_microbatch(load("configs/gpt2_124m.py"), 1, compiled, say=lambda text: None)
    text = facts[0][1]
    if peak(1) > limit:
        assert text.startswith("none: one sequence on each device needs ")
        assert len(facts) == 1
        return
    b = int(text.split()[0])
    assert peak(b) <= limit < peak(b + 1)
    assert {b, b + 1} <= set(tried)
    assert len(tried) <= 5 or bend


def test_the_largest_microbatch_in_stages() -> None:
    """A pipeline's memory grows with its microbatches, whose number must suit the schedule, in each
    attempt and in the advice."""
    n_devices = 1024
    config = load("configs/gpt_175b.py")
    mesh = check(config, n_devices).mesh

    def compiled(changed: TrainConfig) -> Any:
        check(changed, n_devices)
        microbatches.add(changed.train.microbatches)
        b = changed.train.global_batch // changed.train.microbatches // (mesh.data * mesh.fsdp)
        return SimpleNamespace(peak_bytes=b, limit=3, fits=b <= 3)

    microbatches: set[int] = set()
    facts = dict(largest_microbatch(config, n_devices, compiled, say=lambda text: None))
    assert facts["largest microbatch"].startswith("3 sequences")
    assert microbatches == {config.train.microbatches}
    option, _, advised = facts["for this batch"].split(":")[0].partition("=")
    assert option == "--config.train.microbatches"
    check(replace(config, train=replace(config.train, microbatches=int(advised))), n_devices)


def test_the_batch_of_a_plan_is_the_batch_of_a_run(tmp_path: Path) -> None:
    """The compiled program has the names, shapes and dtypes of the one that will run."""
    import jax
    import numpy as np

    from mesh_lm.data.abstract import abstract_batch
    from mesh_lm.data.batches import Batches
    from mesh_lm.data.corpus import prepare
    from sharding_rules import MeshConfig, make_mesh

    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 2000, encoding="utf-8")
    words = {
        "data.path": str(text),
        "data.cache": str(tmp_path / "cache"),
        "data.tokenizer": "bytes",
    }
    for documents in ("joined", "separate"):
        from mesh_lm.commands import command_line

        config = command_line.parse(
            [
                f"--config.{k}={v}"
                for k, v in {**words, "data.documents": documents, "model.seq_len": 32}.items()
            ]
        )
        corpus = prepare(
            config.data, vocab=300, model_vocab=config.model.vocab_size, progress=lambda text: None
        )
        sharding = jax.NamedSharding(make_mesh(MeshConfig(data=8)), jax.P(None, "data"))
        batches = Batches(config, corpus, sharding)
        _, batch = next(training := batches.train())
        training.close()
        wanted = {
            name: (leaf.shape, np.dtype(leaf.dtype), leaf.sharding.spec)
            for name, leaf in batch.items()
        }
        assert {
            n: (s.shape, np.dtype(s.dtype), s.sharding.spec)
            for n, s in abstract_batch(config, sharding).items()
        } == wanted
