"""docs/prepare.md: its commands are accepted, and its numbers are the code's."""

import re
import shlex
from pathlib import Path

from mesh_lm.commands.command_line import command
from mesh_lm.commands.prepare import Prepare
from mesh_lm.data.indexed import dtype_of
from mesh_lm.data.prepare import plan, run, worker

PAGE = (Path(__file__).parents[2] / "docs" / "prepare.md").read_text(encoding="utf-8")


def test_commands() -> None:
    prepare, hub = PAGE.split("\n## Datasets and tokenizers from the Hugging Face Hub\n")
    (block,) = re.findall(r"^```sh\n(.*?)^```$", prepare, re.MULTILINE | re.DOTALL)
    (of_hub,) = re.findall(r"^mesh-lm prepare .*$", hub, re.MULTILINE)
    read = [command(Prepare, shlex.split(line)[2:], "") for line in [*block.splitlines(), of_hub]]
    assert [each.input for each in read] == [
        ("books.jsonl.zst", "code/"),
        ("part-*.parquet",),
        ("part-0.parquet",),
    ]
    assert all(line.startswith("mesh-lm prepare ") for line in block.splitlines())
    options = {f"--{name.replace('_', '-')}" for name in Prepare.__dataclass_fields__}
    # those of a run have a dot
    assert set(re.findall(r"--[a-z][a-z-]*\b(?!\.)", prepare)) <= options


def test_numbers() -> None:
    assert plan.SHARD == 2 * 2**20 and "`.txt` above 2 MiB" in PAGE
    assert worker.PIECE // 10**6 == 1 and "more than a million characters" in PAGE
    assert run._TRAINED_ON // 2**20 == 32 and "32 million characters" in PAGE
    assert (
        dtype_of(65_499).name == "uint16"
        and dtype_of(65_500).name == "int32"
        and "below 65,500" in PAGE
    )
