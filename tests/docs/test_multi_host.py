"""docs/multi_host.md and docs/operations.md name real variables, flags, statuses and errors."""

import re
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs import llama3_8b
from mesh_lm.commands import command_line
from mesh_lm.commands.launch import parse as _parse
from mesh_lm.config import HealthConfig, LaunchConfig
from mesh_lm.errors import ConfigError
from mesh_lm.launch import controller, generation, health, job, messages, nodes
from mesh_lm.launch.health import finding, gpu, programs, system
from mesh_lm.network import exit_status, rendezvous
from mesh_lm.network.process_slot import VARIABLES, ProcessSlot
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import free_port
from mesh_lm.training.elastic import on_nodes

DOCS = Path(__file__).parents[2] / "docs"
PAGE, OPERATIONS = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("multi_host.md", "operations.md")
)
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_the_tables_of_variables() -> None:
    rows = re.findall(r"\| `(MESH_LM_\w+)` \| `--launch\.(\w+)` \|", PAGE)
    assert {field: variable for variable, field in rows} == VARIABLES
    assert dict(re.findall(r"\| `--(\w+)` \| `(MESH_LM_\w+)` \|", PAGE)) == job.VARIABLES


def test_every_command_is_one_that_is_read() -> None:
    assert len(COMMANDS) == 15
    for command in COMMANDS:
        parts = shlex.split(command, comments=True)
        if "launch" in parts:
            options, rest = _parse(parts[parts.index("launch") + 1 :])
            on_slurm = {
                "SLURM_STEP_NUM_NODES": "4",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NODELIST": "n[1-4]",
            }
            assert options.template or job.Job.of(
                options, rest, on_slurm if parts[0] == "srun" else {}
            ).nodes in (1, 2, 4)
            parts = rest
        if "train" in parts:
            command_line.parse(parts[parts.index("train") + 1 :])
        settings = dict(part.split("=", 1) for part in parts if part.startswith("MESH_LM_"))
        assert not settings or ProcessSlot.of(LaunchConfig(), settings) is not None


def test_defaults_and_statuses() -> None:
    """What docs/operations.md says of times and statuses is what the launcher and the watchdog
    have."""
    said = dict(re.findall(r"`--([a-z-]+)=(\d+)` (?:s|of)\b", OPERATIONS))
    assert {*said} == {"restarts", "rejoin", "start", "grace"}
    for option, value in said.items():
        assert getattr(job.Job, option.replace("-", "_")) == int(value), option
    assert f"`--heartbeat` ({job.Job.heartbeat:g} s)" in OPERATIONS
    for field in ("stall", "patience"):
        assert f"`health.{field}` seconds ({getattr(HealthConfig(), field):g})" in " ".join(
            OPERATIONS.split()
        )
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", OPERATIONS, re.MULTILINE))
    known = (
        exit_status.EXIT_CANNOT, exit_status.EXIT_USAGE, exit_status.EXIT_UNEXPECTED, exit_status.EXIT_STALLED,
        exit_status.EXIT_FEWER, exit_status.EXIT_REPLACED,
        exit_status.EXIT_PREEMPTED, exit_status.EXIT_INTERRUPTED,
    )  # fmt: skip
    assert [int(status) for status in rows] == [0, *known]
    assert generation.CRASH_PLAN == ((2.0, signal.SIGTERM), (4.0, signal.SIGKILL))


def test_the_table_of_health_checks(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").touch(0o755)
    one = job.Job(("train.py", "--checkpoint.local=a"), nodes=2, health_command="check")
    (table,) = re.findall(
        r"\| check \| a node fails it if \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL
    )
    named = ", ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)).split(", ")
    assert {*named} == {*health.checks(one, {"PATH": str(tmp_path)})} and len(named) == len(
        {*named}
    )
    for figure in (
        f"in the last {gpu.RECENT / 60:g} min; it counts for {gpu.COUNTS / 60:g} min",
        f"less than {system.FREE / 1e6:.0f} MB", f"end after {finding.LIMIT:g} s at most",
        f"checked again every {nodes._AGAIN:g} s", f"waits at most {controller._FIRST:g} s",
        f"it has {programs._OWN:g} s",
    ):  # fmt: skip
        assert figure in " ".join(PAGE.split()), figure


def test_who_is_where() -> None:
    """The table on the page, from heartbeats like those it tells of."""
    now = time.monotonic()
    beats = {
        0: messages.Beat(412, "step", 30.4, -1, {}, received_at=now - 0.3),
        1: messages.Beat(411, "batch", 0.3, -1, {}, received_at=now - 30.0),
    }
    assert (
        "\n".join(["[launch] last heartbeats:", *messages.progress_table(beats, {1})]) in OPERATIONS
    )
    found, nodes = on_nodes(llama3_8b.get_config(), full=8, nodes=7, per_node=8)
    assert (
        nodes == 4
        and f"`{found.mesh}`, {found.train.microbatches} microbatches instead of 8"
        in " ".join(PAGE.split())
    )


def test_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one on the page, from two processes that differ as it says."""
    mine = {
        "config": {"train": {"global_batch": 512}},
        "code": {"mesh_lm/training/step.py": "5a1c3f0e9b21"},
    }
    theirs = {
        "config": {"train": {"global_batch": 256}},
        "code": {"mesh_lm/training/step.py": "77d0c1b2aa04"},
    }
    address, secret = f"127.0.0.1:{free_port()}", Secret.new()

    def message(index: int, description: dict) -> str:
        with pytest.raises(ConfigError) as caught:
            rendezvous.meet(ProcessSlot(address, 2, index), 20, description, secret)
        return f"error: {caught.value}"

    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "node1")
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(message, (0, 1), (mine, theirs)))
    (shown,) = re.findall(r"```\n(    error: .*?)    ```", PAGE, re.DOTALL)
    assert said[0] == said[1]
    assert said[0] == "\n".join(line[4:] for line in shown.rstrip().splitlines()).replace(
        "node2", "node1"
    )
