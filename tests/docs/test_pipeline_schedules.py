"""docs/pipeline.md: what it shows of schedules and of stages is what the command, the files and
Python say."""

import doctest
import io
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from mesh_lm.commands.command_line import command
from mesh_lm.commands.pipeline import Arguments, main
from mesh_lm.errors import ConfigError
from mesh_lm.schedules.custom import load
from mesh_lm.schedules.schedule import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^mesh-lm pipeline (.*)$", PAGE, re.MULTILINE)


def shown(words: str) -> str:
    console = Console(file=(screen := io.StringIO()), width=120, color_system=None)
    main(shlex.split(words), console)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def block(start: str) -> str:
    """The text block that starts with these words, without its last newline."""
    (found,) = re.findall(
        rf"^```text\n({re.escape(start)}.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL
    )
    return found


def test_the_screen() -> None:
    facts, table = block("bubble ").split("\n\n")
    screen = shown(COMMANDS[0])
    assert facts in screen
    assert table in screen


def test_commands_and_names() -> None:
    read = [command(Arguments, shlex.split(words), "") for words in COMMANDS]
    assert [each.stages for each in read] == [8, 4, 8, 4, 0]
    assert {name for name in NAMES if f"| `{name}` |" in PAGE} == set(NAMES)


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown("--stages=2 --microbatches=3 --csv=mine.csv")
    text = Path("mine.csv").read_text(encoding="utf-8")
    assert text == block("# 1f1b") + "\n"
    for old, new in (("1F0;1B0", "1F0"), ("1F1;1B1", "1F1;1B0"), ("1F2;1B2,", "1F2;1B1,1B2")):
        text = text.replace(old, new)
    Path("mine.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load("mine.csv")
    assert f"error: {error.value}" == block("error: mine.csv:2")


def test_the_stages_of_unlike_segments() -> None:
    found = doctest.testfile(
        str(Path(__file__).parents[2] / "docs" / "pipeline.md"), module_relative=False
    )
    assert (found.attempted, found.failed) == (6, 0)
