"""Names that users of other frameworks type, or guess: the error suggests the right one."""

import dataclasses

import pytest

from mesh_lm.commands import guesses
from mesh_lm.commands.command_line import parse, parse_with
from mesh_lm.commands.plan_options import Plan
from mesh_lm.config import TrainConfig, load
from mesh_lm.config.run import expert
from mesh_lm.errors import ConfigError, hub_hint
from sharding_rules import PRESETS, Rules

ANSWERS = {
    "--config.lr=1e-3": "--config.lr: no such field; did you mean --config.optimizer.learning_rate?",
    "--lr=1e-3": "--lr: no such field; did you mean --optimizer.learning_rate?",
    "--learning-rate=1e-3": "--learning_rate: no such field; did you mean --optimizer.learning_rate?",
    "--config.batch_size=8": "--config.batch_size: no such field; did you mean --config.train.global_batch?",
    "--train.epochs=3": "--train.epochs: no such field; did you mean --train.steps?",
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


def test_rules_of_other_names() -> None:
    wrong = {"tp": "megatron", "fsdp2": "fsdp", "zero3+tp": "zero3+megatron", "fsdp2+tp": "fsdp+megatron", "TP": "megatron"}
    for name, meant in {**wrong, "tp+sp": "megatron_sp"}.items():
        with pytest.raises(ConfigError) as caught:
            parse([f"--rules={name}"])
        assert str(caught.value) == f"bad command line\n  - --rules={name}: no such rules preset; did you mean {meant}?"
    assert not guesses.RULES.keys() & PRESETS.keys(), "names of presets are no guesses"


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


def test_every_guess_leads_somewhere() -> None:
    fields = leaves(load("gpt_tiny"))
    assert not set(guesses.FIELDS.values()) - set(fields) and not set(guesses.RULES.values()) - set(PRESETS)
    assert not set(guesses.FIELDS) & {name.rpartition(".")[2] for name in fields}, "a field's own name is found without a guess"
    assert not {field.name for field in dataclasses.fields(Plan)} & {name.partition(".")[0] for name in fields}, "options of train.py"


def test_few_fields_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 90; expert fields are shown on request, and set like any other."""
    fields = leaves(load("gpt_tiny"))
    shown = {}
    for flag in ("--help", "--help-all", "--help=all"):
        with pytest.raises(SystemExit):
            parse([flag])
        shown[flag] = {word.removeprefix("--config.") for word in capsys.readouterr().out.split() if word.startswith("--config.")}
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
