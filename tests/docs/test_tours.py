"""docs/tours: Megatron-LM's arguments stand beside fields that exist, and the two commands of that
page describe the same run."""

import dataclasses
import operator
import re
import shlex
from pathlib import Path

import pytest

from mesh_lm.commands import command_line
from mesh_lm.config import TrainConfig, load
from mesh_lm.model import DecoderConfig
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.optim import AdamW
from mesh_lm.training.check import check
from sharding_rules import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tours" / "from_megatron.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| (`--.*) \| (.*) \|$", PAGE, re.MULTILINE)
MEGATRON, OURS = (
    text.replace("\\\n", " ")
    for text in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


def fields() -> set[str]:
    """Every field as section.field, and those of the run itself."""
    config = dataclasses.replace(load("configs/gpt_tiny.py"), model=DecoderConfig())
    sections = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)
    }
    found = {
        f"{name}.{field.name}"
        for name, value in sections.items()
        if dataclasses.is_dataclass(value)
        for field in dataclasses.fields(value)
    }
    rule = {f"optimizer.rule.{field.name}" for field in dataclasses.fields(AdamW)}
    experts = {f"model.experts.{field.name}" for field in dataclasses.fields(ExpertsConfig)}
    metrics = {"expert_load", "expert_idle", "grad_norm"}
    return found | rule | experts | metrics | set(sections)


def test_the_fields_of_the_table_exist() -> None:
    named = {
        word.split("=")[0]
        for _, ours in TABLE
        for word in re.findall(r"`([a-z][\w.]*(?:=[\w.]+)?)`", ours)
    }
    assert len(TABLE) > 35 and len(named) > 50 and named - PRESETS.keys() <= fields()
    assert {"mesh.sequence", "ring", "ulysses", "context_gather", "usp"} <= named


def test_each_argument_of_their_command_is_in_the_table() -> None:
    known = {word for theirs, _ in TABLE for word in re.findall(r"--[\w-]+", theirs)}
    asked = {word.split("=")[0] for word in shlex.split(MEGATRON) if word.startswith("--")}
    assert asked - known == set()


def test_both_commands_are_the_same_run() -> None:
    theirs = dict(re.findall(r"--([\w-]+) (?!--)([\w.,/-]+)", MEGATRON))
    words = shlex.split(OURS)
    config = command_line.parse(words[words.index("train") + 1 :])
    model, loop = config.model, config.train
    assert isinstance(model, DecoderConfig)
    assert (model.n_layers, model.d_model, model.n_heads, model.seq_len) == tuple(
        int(theirs[name])
        for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
    )
    gpus = int(re.findall(r"--nproc-per-node=(\d+)", MEGATRON)[0])
    data = gpus // int(theirs["tensor-model-parallel-size"])
    assert (
        loop.global_batch
        == int(theirs["global-batch-size"])
        == loop.microbatches * data * int(theirs["micro-batch-size"])
    )
    assert loop.steps == int(theirs["train-iters"]) and config.optimizer.learning_rate == float(
        theirs["lr"]
    )
    assert (
        config.mesh.tensor == int(theirs["tensor-model-parallel-size"])
        and config.rules.name == "distributed+megatron_sp"
    )
    assert config.data.split == theirs["split"] and config.checkpoint.every == int(
        theirs["save-interval"]
    )
    optimizer = config.optimizer
    assert (vars(optimizer.rule)["beta2"], optimizer.weight_decay, config.seed) == tuple(
        float(theirs[name]) for name in ("adam-beta2", "weight-decay", "seed")
    )
    assert optimizer.final_fraction * optimizer.learning_rate == pytest.approx(
        float(theirs["min-lr"])
    )
    assert (
        model.dropout == float(theirs["hidden-dropout"]) == float(theirs["attention-dropout"]) == 0
    )
    assert check(config, gpus).mesh.data == data


def test_its_vocabulary_has_room_for_the_tokenizer() -> None:
    """Qwen3's tokenizer has 151,669 ids."""
    words = shlex.split(OURS)
    config = command_line.parse(words[words.index("train") + 1 :])
    assert (
        config.model.vocab_size >= 151_669
        and config.data.tokenizer == "Qwen3-0.6B"
        and f"{config.model.vocab_size:,}" in PAGE
    )


def test_the_defaults_that_differ_are_ours() -> None:
    section = PAGE.partition("## Defaults that differ")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"`([a-z][\w.]*)=([\w.]+)`", section))
    config = TrainConfig(DecoderConfig(), output="")
    assert len(shown) == 8
    for field, value in shown.items():
        assert value == str(operator.attrgetter(field)(config)), field


def test_the_layer_of_the_experiment_is_the_file() -> None:
    shown = re.findall(
        r"^```python\n(class .*?)^```$",
        (DOCS / "tours" / "experiment.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert len(shown) == 1 and shown[0] in (DOCS / "own_block.py").read_text(encoding="utf-8")
