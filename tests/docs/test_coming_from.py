"""docs/coming_from.md: its tables name fields and presets that exist, and its DeepSpeed file becomes
the config of which the page speaks."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from mesh_lm.commands import command_line
from mesh_lm.commands.conversion import left_out_lines
from mesh_lm.commands.convert import from_deepspeed, parse
from mesh_lm.commands.main import main
from mesh_lm.commands.other_names import DEEPSPEED, OTHERS, look_up
from mesh_lm.commands.torch_names import DDP, FSDP, HOROVOD
from mesh_lm.config import load
from mesh_lm.training.check import check
from sharding_rules import PRESETS, preset

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming_from.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_fields_and_rules_exist() -> None:
    fields = {*command_line.field_types(load("gpt2_124m")), "optimizer.rule.momentum"}
    sections = {field.partition(".")[0] for field in fields}
    n_named = 0
    for _, ours in ROWS:
        for word, value in re.findall(r"`([a-z_]+(?:\.\w+)*)(?:=([\w.+=]+))?`", ours):
            if word.partition(".")[0] in sections:
                n_named += 1
                assert word in fields or word in sections, ours
            if word == "rules" and value:
                assert preset(value), ours
        for factor in re.findall(r"[\w]+\+(reduce_\w+|megatron_sp)", ours):
            assert factor in PRESETS or preset(f"ddp+{factor}"), ours
    assert n_named > 60


def test_every_name_of_the_code_is_on_the_page() -> None:
    for name in (*DDP, *FSDP, *HOROVOD, *DEEPSPEED):
        assert f"`{name}`" in PAGE


def test_the_deepspeed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    json_block = PAGE.partition("```json\n")[2].partition("```")[0]
    Path("ds_config.json").write_text(json_block, encoding="utf-8")
    (words,) = [words for words in COMMANDS if "deepspeed" in words]
    conversion, text = from_deepspeed(parse(words[2:]))  # pyright: ignore[reportArgumentType]
    assert 'rules=preset("zero2"),  # zero_optimization.stage: 2' in text
    assert '`rules=preset("zero2"),  # zero_optimization.stage:\n2`' in PAGE
    lost = [item.source for item in conversion.left_out if item.is_lost]
    assert lost == [
        "zero_optimization.offload_optimizer.device: cpu",
        "scheduler.params.warmup_type: log, DeepSpeed's default",
    ]
    optimizer = conversion.config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.clip_norm) == (3e-4, 100, 1)
    assert main(words[1:]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in left_out_lines(conversion.left_out))
    assert load("gpt2_zero2.py") == conversion.config


def test_islands_as_federated_averaging() -> None:
    (words,) = [words for words in COMMANDS if "--rules=diloco" in words]
    config = check(command_line.parse(words[2:]), 8)
    diloco = config.diloco
    assert (diloco.outer_learning_rate, diloco.outer_momentum) == (1, 0)
    assert config.mesh.island == 2


def test_names_of_torch_have_answers() -> None:
    assert look_up("reshard_after_forward") is FSDP["reshard_after_forward"]
    assert look_up("mesh") is None
    assert not {name for name in {**DDP, **FSDP} if name in OTHERS}
    fields = {field.name for field in dataclasses.fields(load("gpt2_124m"))}
    assert not fields & {name for name in {**DDP, **FSDP} if look_up(name)}
