"""The options of commands on a trained model: read without JAX, so their defaults are written
twice, and what becomes of them."""

import dataclasses
import inspect
from typing import get_args, get_type_hints

import pytest

from mesh_lm.commands import evaluate, generate, huggingface
from mesh_lm.commands.model_arguments import ModelArguments
from mesh_lm.huggingface import save
from mesh_lm.huggingface.export_weights import DType
from mesh_lm.inference import Sampling, model_arguments


def test_defaults_are_those_of_what_they_are_given_to() -> None:
    fields = {
        field.name: field.default
        for field in dataclasses.fields(ModelArguments)
        if field.name != "checkpoint"
    }
    parameters = inspect.signature(model_arguments.load).parameters
    assert fields == {
        name: each.default
        for name, each in parameters.items()
        if name not in ("checkpoint", "command")
    }
    options = generate.Arguments("run")
    assert Sampling(options.temperature, options.top_k, options.top_p) == Sampling()
    assert set(get_args(get_type_hints(huggingface.Export)["dtype"])) == set(get_args(DType))
    assert (
        huggingface.Export("run", "out").dtype
        == inspect.signature(save).parameters["dtype"].default
    )


def test_words_without_a_name() -> None:
    assert generate.parse(["run", "def ", "class "]) == generate.parse(
        ["--checkpoint=run", "--prompt", "def ", "class "]
    )
    assert generate.parse(["--prompt=def ", "--checkpoint", "run"]).prompt == ("def ",)
    assert generate.parse(["run", "--ignore-eod", "def "]) == generate.Arguments(
        "run", prompt=("def ",), ignore_eod=True
    )
    assert evaluate.parse(["run", "--text=a"]) == evaluate.Arguments("run", text="a")
    assert huggingface.parse_import(["here", "--output=run"]) == huggingface.Import("here", "run")


def test_what_a_command_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All options of the model, the config file of one's own class among them; and all words must
    be the same on all processes."""
    given: list[dict] = []

    def load(**options: object) -> object:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(model_arguments, "load", load)
    for run in (
        lambda: generate.main(
            ["run", "a", "--config=mine.py", "--mesh=data=2", "--dtype=float32", "--seed=3"]
        ),
        lambda: huggingface.main(
            [
                "export",
                "run",
                "--output=out",
                "--config=mine.py",
                "--rules=fsdp",
                "--tokenizer=bytes",
            ]
        ),
    ):
        with pytest.raises(KeyboardInterrupt):
            run()
    first, second = given
    assert (first["checkpoint"], first["config"], first["mesh"], first["dtype"]) == (
        "run",
        "mine.py",
        "data=2",
        "float32",
    )
    assert (first["command"]["seed"], first["command"]["prompt"]) == (3, ("a",))
    assert (second["checkpoint"], second["config"], second["rules"], second["tokenizer"]) == (
        "run",
        "mine.py",
        "fsdp",
        "bytes",
    )
