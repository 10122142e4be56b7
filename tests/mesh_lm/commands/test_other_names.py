"""Names that users of other frameworks type, or guess: the error suggests the right one."""

import dataclasses
import re

import pytest

from mesh_lm.commands import other_names
from mesh_lm.commands.command_line import parse, parse_with
from mesh_lm.commands.main import main
from mesh_lm.commands.plan_options import Plan
from mesh_lm.config import TrainConfig, load
from mesh_lm.config.files import shipped
from mesh_lm.config.run import expert
from mesh_lm.errors import ConfigError, hub_hint
from sharding_rules import PRESETS, Rules

ANSWERS = {
    "--config.lr=1e-3": "--config.lr: no such field; did you mean --config.optimizer.learning_rate?",
    "--lr=1e-3": "--lr: no such field; did you mean --optimizer.learning_rate?",
    "--learning-rate=1e-3": "--learning_rate: no such field; did you mean --optimizer.learning_rate?",
    "--config.batch_size=8": "--config.batch_size: no such field; did you mean --config.train.global_batch?",
    "--tensor-model-parallel-size=2": "--tensor_model_parallel_size: no such field; did you mean --mesh.tensor?",
    "--train.epochs=3": (
        "--train.epochs: no such field; train.steps: epochs x sequences of the training text / train.global_batch; data.max_epochs is only "
        "a limit"
    ),
    "--min-lr=6e-5": (
        "--min_lr: no such field; here it is optimizer.final_fraction: minimum / optimizer.learning_rate = 6e-5 / 0.008; did you mean "
        "--optimizer.final_fraction=0.0075?"
    ),
    "--swiglu": "--swiglu: no such field; did you mean --model.activation=swiglu?",
    "--recompute-granularity=selective": "--recompute_granularity: no such field; did you mean --model.remat=save_names?",
    "--rampup-batch-size=4": "--rampup_batch_size: no such field; not built: every step has train.global_batch sequences",
    "--moe-aux-loss-coeff=1e-2": "--moe_aux_loss_coeff: no such field; not built: mixture of experts",
    "--dry-run": "--dry_run: no such field; mesh-lm plan shows memory, communication and time without starting the run",
    "min_lr=6e-5": (
        "min_lr=6e-5: belongs to no option; here it is optimizer.final_fraction: minimum / optimizer.learning_rate = 6e-5 / 0.008; did you "
        "mean --optimizer.final_fraction=0.0075?"
    ),
    "--model.window=None": "--model.window=None: expected int, with commas between several and nothing for none",
    "--model.segments=a": (
        "--model.segments=a: expected NAME:LAYERS[:KIND[:REMAT[:DTYPE]]], with commas between several and nothing for none"
    ),
    "config=configs/gpt_tiny.py": "config=configs/gpt_tiny.py: belongs to no option; did you mean --config=configs/gpt_tiny.py?",
    "rules=tp": "rules=tp: belongs to no option; did you mean --rules=tp?",
    "train.steps=3": "train.steps=3: belongs to no option; did you mean --train.steps=3?",
    "lr=3": "lr=3: belongs to no option; did you mean --optimizer.learning_rate=3?",
    "--hlep": "--hlep: no such field; did you mean --help?",
    "--optimizer=muon": "--optimizer: a section, not a field; set its fields, as in --optimizer.name",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_the_answer_names_what_was_meant(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([word])
    assert str(caught.value) == f"bad command line\n  - {ANSWERS[word]}"


FORMULAS = {
    "--micro-batch-size 4 --train.global_batch=512 --mesh.data=4": (
        "train.microbatches, a number, not a size: global batch / (micro-batch size x data x fsdp) = 512 / (4 x 4 x 1); did you mean "
        "--train.microbatches=32?"
    ),
    "--micro-batch-size 4 --global-batch-size 512 --mesh.fsdp=8": (  # the batch by its name in Megatron-LM, which is refused as well
        "train.microbatches, a number, not a size: global batch / (micro-batch size x data x fsdp) = 512 / (4 x data x 8)"
    ),
    "--eval-iters=10 --train.global_batch=64": (
        "train.eval_sequences, sequences instead of batches: iterations x train.global_batch = 10 x 64; did you mean "
        "--train.eval_sequences=640?"
    ),
    "--train-samples=1000 --train.global_batch=64": (
        "train.steps: samples / train.global_batch = 1000 / 64; did you mean --train.steps=16?"
    ),
    "--lr-warmup-fraction=0.01 --train.steps=5000": (
        "optimizer.warmup_steps: fraction x train.steps = 0.01 x 5000; did you mean --optimizer.warmup_steps=50?"
    ),
    "--num-layers-per-virtual-pipeline-stage=3 --mesh.pipeline=2 --model.n_layers=12": (
        "pipeline.chunks, a number of virtual stages: layers / (stages x layers of a virtual stage) = 12 / (2 x 3); did you mean "
        "--pipeline.chunks=2?"
    ),
    "--micro-batch-size=many": (
        "train.microbatches, a number, not a size: global batch / (micro-batch size x data x fsdp) = 16 / (many x data x 1)"
    ),
}


@pytest.mark.parametrize("words", FORMULAS)
def test_a_formula_has_the_numbers_of_the_run(words: str) -> None:
    """A size is not suggested for a number, nor batches for sequences."""
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    first = str(caught.value).split("\n  - ")[1]
    assert first.partition("; here it is ")[2] == FORMULAS[words]


def test_words_after_a_blend() -> None:
    """With spaces, with commas, or with both; by Megatron-LM's name they are one answer; and a config after them is the config."""
    blend = ("0.7", "data/web", "0.3", "data/code")
    for words in (
        ["--data.blend=0.7,data/web,0.3,data/code"],
        ["--data.blend", *blend],
        ["--data.blend", "0.7,data/web,", "0.3,data/code"],
    ):
        assert parse([*words, "--train.steps=3"]).data.blend == blend
        assert parse(["gpt2_124m", *words]) == parse([*words, "gpt2_124m"])
    with pytest.raises(ConfigError) as caught:
        parse(["--data-path", *blend, "stray", "--lr=1"])
    assert str(caught.value).split("\n  - ")[1:] == [
        "--data_path: no such field; did you mean --data.blend=0.7,data/web,0.3,data/code,stray?",
        "--lr: no such field; did you mean --optimizer.learning_rate?",
    ]


def test_unknown_options_come_before_stray_words() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["gpt_tiny", "stray", "--foo=1"])
    assert str(caught.value).split("\n  - ")[1:] == ["--foo: no such field; see --help", "stray: belongs to no option"]


def test_rules_of_other_names() -> None:
    wrong = {"tp": "megatron", "fsdp2": "fsdp", "zero3+tp": "zero3+megatron", "fsdp2+tp": "fsdp+megatron", "TP": "megatron"}
    for name, meant in {**wrong, "tp+sp": "megatron_sp"}.items():
        with pytest.raises(ConfigError) as caught:
            parse([f"--rules={name}"])
        assert str(caught.value) == f"bad command line\n  - --rules={name}: no such rules preset; did you mean {meant}?"
    assert not other_names.RULES.keys() & PRESETS.keys(), "names of presets are no guesses"


def test_a_config_by_its_name() -> None:
    assert parse(["--config=gpt2_124m"]) == parse(["gpt2_124m"]) == load("configs/gpt2_124m.py")
    with pytest.raises(ConfigError, match=r"^--config=gpt_tinny: no such file; did you mean gpt_tiny\?$"):
        parse(["gpt_tinny"])
    with pytest.raises(ConfigError, match=r"^--config=x: no such file; give the path of a \.py file, or one of gpt2_124m, "):
        parse(["--config=x"])


def test_both_spellings_are_one() -> None:
    """With --config. or without it; if a command has an option with a field's name, only the long form is the config's."""
    words = ["train.steps=3", "model.d_model=64", "output=runs/mine", "rules=fsdp"]
    assert parse([f"--{word}" for word in words]) == parse([f"--config.{word}" for word in words])

    @dataclasses.dataclass(frozen=True)
    class Beside:
        output: str = ""

    config, given = parse_with(Beside, ["--output=a", "--config.output=b"])
    assert (config.output, given) == ("b", {"output": "a"})


def leaves(section: object, prefix: str = "") -> dict[str, bool]:
    """section.field -> whether only --help-all shows it."""
    found: dict[str, bool] = {}
    for field in dataclasses.fields(section):  # pyright: ignore[reportArgumentType]
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules):
            found |= leaves(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = bool(field.metadata.get("expert"))
    return found


def test_every_meaning_leads_somewhere() -> None:
    fields = leaves(load("gpt_tiny"))
    meanings = [*other_names.MEGATRON.values(), *other_names.OTHERS.values()]
    assert not {meaning.field for meaning in meanings} - {"", *fields} and not set(other_names.RULES.values()) - set(PRESETS)
    assert all(meaning.field or not meaning.convert for meaning in meanings)
    sections = {name.partition(".")[0] for name in fields} | {"runs"}
    named = {word for meaning in meanings for word in re.findall(r"`([a-z_]+\.\w+)", meaning.ours)}
    assert {word for word in named if word.partition(".")[0] in sections} <= set(fields) and len(named) > 50
    assert not set(other_names.OTHERS) & {name.rpartition(".")[2] for name in fields}, "a field's own name is found without a guess"
    assert not {field.name for field in dataclasses.fields(Plan)} & {name.partition(".")[0] for name in fields}, "options of train.py"


def test_names_of_megatron_that_people_type() -> None:
    """Those that a pretraining script of Megatron-LM has, and that changed their meaning or had no answer before."""
    typed = """lr-decay-iters lr-warmup-fraction rampup-batch-size train-samples init-method-std vocab-file merge-file tensorboard-dir
        exit-duration-in-mins mock-data ckpt-format async-save num-experts expert-model-parallel-size moe-router-topk"""
    assert set(typed.split()) <= set(other_names.MEGATRON)


def test_few_fields_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 90; expert fields are shown on request, and set like any other."""
    fields = leaves(load("gpt_tiny"))
    shown = {}
    for flag in ("--help", "--help-all", "--help=all"):
        with pytest.raises(SystemExit):
            parse([flag])
        text = capsys.readouterr().out
        shown[flag] = {word.removeprefix("--").partition("=")[0] for word in text.split() if word.startswith("--")}
        assert flag != "--help" or text.count("\n") < 200
    assert shown["--help-all"] == shown["--help=all"] and set(fields) <= shown["--help-all"]
    assert {name for name in fields if name in shown["--help"]} == {name for name, hidden in fields.items() if not hidden}
    assert sum(not hidden for hidden in fields.values()) <= 90
    assert parse(["--model.z_loss=0.5"]).model.z_loss == 0.5  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(TrainConfig(model=load("gpt_tiny").model, output="x")).data.threads == 2, "a default like any other"
    assert isinstance(expert(3), dataclasses.Field)


def test_names_on_the_hub() -> None:
    assert hub_hint("gpt2") == ". For a name on the Hugging Face Hub: hf download gpt2 --local-dir=gpt2"
    assert hub_hint("hf://datasets/org/texts", "dataset").endswith("hf download --repo-type=dataset org/texts --local-dir=org/texts")
    for path in ("/data/x", "~/corpus.txt", "runs/gpt_tiny", "my.txt", "./x", "data/web", "a/b/c", "../gpt2"):
        assert hub_hint(path) == "", path


def test_what_is_no_config() -> None:
    """YAML, and a model of the Hub: one line with what to do."""
    with pytest.raises(ConfigError, match=r"^--config=x\.yaml: a config is a \.py file with get_config\(\).*`mesh-lm configs`"):
        parse(["--config=x.yaml"])
    with pytest.raises(ConfigError, match=r"hf download meta-llama/Llama-3\.2-1B .*then mesh-lm import meta-llama/Llama-3\.2-1B --output="):
        parse(["--config=meta-llama/Llama-3.2-1B"])


def test_configs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*shipped()] and len(lines) > 10
    assert all(len(line.split()) > 5 for line in lines)
