"""docs/multi_host.md names real variables, flags and errors."""

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mesh_lm import cli
from mesh_lm.config import ConfigError, LaunchConfig
from mesh_lm.launch import rendezvous
from mesh_lm.launch.__main__ import free_port
from mesh_lm.launch.place import VARIABLES, Place

PAGE = (Path(__file__).parents[2] / "docs" / "multi_host.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_the_table_of_variables() -> None:
    rows = re.findall(r"\| `(MESH_LM_\w+)` \| `--config\.launch\.(\w+)` \|", PAGE)
    assert {field: variable for variable, field in rows} == VARIABLES


def test_every_command_is_one_that_train_py_reads() -> None:
    assert len(COMMANDS) == 4
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        cli.parse(words[words.index("train.py") + 1 :])
        settings = dict(word.split("=", 1) for word in words if word.startswith("MESH_LM_"))
        assert not settings or Place.of(LaunchConfig(), settings) is not None


def test_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one on the page, from two processes that differ as it says."""
    mine = {"config": {"train": {"global_batch": 512}}, "code": {"mesh_lm/step.py": "5a1c3f0e9b21"}}
    theirs = {"config": {"train": {"global_batch": 256}}, "code": {"mesh_lm/step.py": "77d0c1b2aa04"}}
    address = f"127.0.0.1:{free_port()}"

    def message(index: int, description: dict) -> str:
        with pytest.raises(ConfigError) as caught:
            rendezvous.meet(Place(address, 2, index), 20, description)
        return f"error: {caught.value}"

    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "node1")
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(message, (0, 1), (mine, theirs)))
    (shown,) = re.findall(r"```\n(  error: .*?)  ```", PAGE, re.DOTALL)
    assert said[0] == said[1]
    assert said[0] == "\n".join(line[2:] for line in shown.rstrip().splitlines()).replace("node2", "node1")
