"""The process index from flags, variables or Slurm; no process is started."""

import socket
from pathlib import Path

import pytest

from mesh_lm.commands.launch import parse as _parse
from mesh_lm.config import LaunchConfig
from mesh_lm.errors import ConfigError
from mesh_lm.launch.job import Job
from mesh_lm.launch.process_slot import ProcessSlot, first_host, gpus_here, tasks_here

VARIABLES = {"MESH_LM_COORDINATOR": "node1:99", "MESH_LM_PROCESSES": "4", "MESH_LM_PROCESS_INDEX": "3"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


def test_one_process_is_the_default() -> None:
    assert ProcessSlot.of(LaunchConfig(), {}) is None
    assert ProcessSlot.of(LaunchConfig(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}) is None, "a batch script without srun is one process"
    assert ProcessSlot.of(LaunchConfig(coordinator="a:1", processes=1, index=0), {}) is None


def test_flags_win_over_variables_and_variables_over_slurm() -> None:
    everywhere = VARIABLES | SLURM
    assert ProcessSlot.of(LaunchConfig(coordinator="[::1]:7", processes=2, index=0), everywhere) == ProcessSlot("[::1]:7", 2, 0)
    assert ProcessSlot.of(LaunchConfig(), everywhere) == ProcessSlot("node1:99", 4, 3)
    assert ProcessSlot("[::1]:7", 2, 0).address == ("::1", 7)
    assert ProcessSlot.of(LaunchConfig(), VARIABLES | {"MESH_LM_LOCAL_DEVICES": "2,3"}) == ProcessSlot("node1:99", 4, 3, (2, 3))


@pytest.mark.parametrize(
    ("gpus", "local", "tasks", "mine"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 0, 1, None),  # one task per node: all GPUs
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, 4, (3,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1, 2, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, 3, 4, None),  # --gpus-per-task: each task sees only its own
        ({"SLURM_GPUS_ON_NODE": "8"}, 1, 2, (4, 5, 6, 7)),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 1, 2, (4, 5, 6, 7)),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1, 2, None),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 3, 4, None),
        ({}, 3, 4, (3,)),
    ],
)
def test_slurm_shares_the_gpus_of_a_node(gpus: dict[str, str], local: int, tasks: int, mine: tuple[int, ...] | None) -> None:
    slot = ProcessSlot.of(LaunchConfig(), SLURM | gpus | {"SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)"})
    assert slot is not None and slot.local_devices == mine
    assert (slot.count, slot.index, slot.address[0]) == (2, 1, "n1") and 61_440 <= slot.address[1] < 65_536


def test_two_steps_of_a_job_use_two_ports() -> None:
    slots = [ProcessSlot.of(LaunchConfig(), SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(3)]
    assert len({slot.address[1] for slot in slots if slot}) == 3


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("n1", "n1"), ("a,b", "a"), ("n[1-2]", "n1"), ("gpu-a[001-004,007],b", "gpu-a001"), ("r[1,3]-eth", "r1-eth"), ("x[03]", "x03")],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_tasks_here() -> None:
    assert [tasks_here("8(x2),4", node) for node in range(3)] == [8, 8, 4]


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({"coordinator": "a:1"}, {}, "launch.coordinator=a:1 is given without launch.processes and launch.index; a run of several"),
        ({}, {"MESH_LM_PROCESSES": "2", "MESH_LM_PROCESS_INDEX": "0"}, "is given without MESH_LM_COORDINATOR"),
        ({"coordinator": "a", "processes": 2, "index": 0}, {}, "launch.coordinator=a must be host:port of process 0, such as node1:9876"),
        ({"coordinator": "a:1", "processes": 2, "index": 2}, {}, "launch.index=2 must be 0 to launch.processes - 1 = 1"),
        ({}, VARIABLES | {"MESH_LM_PROCESSES": "four"}, "MESH_LM_PROCESSES=four and MESH_LM_PROCESS_INDEX=3 must be integers"),
        ({}, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_GPUS_ON_NODE": "8"}, "8 GPUs of this node cannot be divided equally"),
    ],
)
def test_an_impossible_place(config: dict, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProcessSlot.of(LaunchConfig(**config), environment)
    assert message in str(caught.value)


NODE = {"MESH_LM_NODES": "4", "MESH_LM_NODE": "3", "MESH_LM_RENDEZVOUS": "node1:99"}
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}


def job(*words: str, **environment: str) -> Job:
    return Job.of(*_parse([*words, "train.py"]), environment)


def test_where_a_launcher_is() -> None:
    """Options win over variables, and variables over Slurm; all values come from one source."""
    assert (job().nodes, job().node, job().address[0]) == (1, 0, "127.0.0.1")
    assert (job(**NODE).nodes, job(**NODE).node, job(**NODE).address) == (4, 3, ("node1", 99))
    found = job("--nodes=2", "--node=1", "--rendezvous=[::1]:7", **(NODE | SLURM | STEP))
    assert (found.nodes, found.node, found.address) == (2, 1, ("::1", 7))
    found = job(**(SLURM | STEP))
    assert (found.nodes, found.node, found.address[0]) == (2, 1, "n1") and 61_440 <= found.address[1] < 65_536
    assert job(SLURM_JOB_ID="7", SLURM_NNODES="4").nodes == 1, "a batch script without srun is one node"
    with pytest.raises(ConfigError, match="srun starts 8 launchers on 2 nodes; pass --ntasks-per-node=1"):
        job(**(SLURM | STEP | {"SLURM_STEP_NUM_TASKS": "8"}))


def test_workers_share_the_gpus_of_their_node(tmp_path: Path) -> None:
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert [job("--per-node=4").devices_of(local, eight) for local in (0, 3)] == ["0,1", "6,7"]
    assert job().devices_of(0, eight) == "" and job("--per-node=2", "--devices=4").devices_of(0, eight) == ""
    assert job("--per-node=2").devices_of(1, {"PATH": str(tmp_path)}) == "", "no GPU: each worker has its own CPU device"
    with pytest.raises(ConfigError, match="divided equally among its 3 workers; start one worker per node, or one per GPU"):
        job("--per-node=3").devices_of(0, eight)


def test_gpus_are_counted_without_jax(tmp_path: Path) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}) == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    assert gpus_here({"PATH": str(tmp_path)}) == 2
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(RuntimeError, match=f"cannot count the GPUs of {socket.gethostname()}: .*exit status 9"):
        gpus_here({"PATH": str(tmp_path)})
    assert job().devices_of(0, {"PATH": str(tmp_path)}) == "", "one process takes what JAX finds"
