"""docs/generation.md and docs/evaluation.md: their commands run, on a tiny model, and their errors
are the real ones."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import tiny_run

from mesh_lm.commands import command_line, evaluate, generate
from mesh_lm.errors import ConfigError

COMPILE_BUDGET = 60
DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    block
    for page in ("generation", "evaluation")
    for block in re.findall(
        r"^```(\w+)\n(.*?)^```$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S
    )
]
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("here")
    tiny_run.write(
        directory / "runs" / "gpt_tiny", dataclasses.replace(tiny_run.MODEL, seq_len=256)
    )
    (directory / "prompts.txt").write_text("def \nclass ", encoding="utf-8")
    (directory / "README.md").write_text("Some text. " * 40, encoding="utf-8")
    (directory / "pages.jsonl").write_text(
        '{"text": "A page."}\n{"text": "Another."}\n', encoding="utf-8"
    )
    return directory


def words(command: str) -> list[str]:
    """Without --cpu-devices: this process has its devices already."""
    return [
        word
        for word in shlex.split(command.replace("$'\\n'", "'\n'"))
        if not word.startswith("--cpu-devices")
    ]


def test_every_command_is_tried() -> None:
    modules = [words(command)[1] for command in COMMANDS if command.startswith("mesh-lm")]
    assert modules == ["generate"] * 4 + ["evaluate"] * 3


RUN = [command for command in COMMANDS if "mesh-lm generate" in command or "--text" in command]
FAST = {
    next(command for command in RUN if word in command)
    for word in ("mesh-lm generate", "texts.jsonl", "--text=")
}


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=() if command in FAST else pytest.mark.slow) for command in RUN],
)
def test_commands(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(here)
    _, name, *arguments = words(command)
    assert {"generate": generate, "evaluate": evaluate}[name].main(
        [*arguments, "--compile-cache="]
    ) == 0
    out = capsys.readouterr().out
    assert (
        ("bits per byte (gzip" in out)
        if "--text" in command
        else ("def " in out or "2 texts: texts.jsonl" in out)
    )
    if "texts.jsonl" in command:
        assert [
            list(json.loads(line))
            for line in Path("texts.jsonl").read_text(encoding="utf-8").splitlines()
        ] == [["prompt", "text", "tokens", "logprobs", "reason"]] * 2


def test_the_command_for_tasks() -> None:
    (command,) = [c for c in COMMANDS if "mesh-lm evaluate" in c and "--tasks" in c]
    found = command_line.command(evaluate.Arguments, words(command)[2:], "")
    assert (found.tasks, found.include_path, found.limit, found.json) == (
        "my_task",
        "tasks",
        100,
        "result.json",
    )


def test_the_error(here: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "text"]
    with pytest.raises(ConfigError) as caught:
        generate.main(
            [f"--checkpoint={here}/runs/gpt_tiny", "--compile-cache=", "--prompt=a", "--tokens=300"]
        )
    assert f"error: {caught.value}\n" == text


@pytest.mark.slow
def test_from_python(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(here)
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    names: dict = {}
    exec(code, names)
    assert names["first"].text != names["second"].text and capsys.readouterr().out
