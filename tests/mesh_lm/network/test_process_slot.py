"""The process index from flags, variables or Slurm; no process is started."""

import socket
from pathlib import Path

import pytest

from mesh_lm.commands.launch import parse as _parse
from mesh_lm.config import LaunchConfig
from mesh_lm.errors import ConfigError
from mesh_lm.launch.job import Job
from mesh_lm.network.process_slot import (
    ProcessSlot,
    first_host,
    gpus_here,
    tasks_here,
    visible_gpus,
)

VARIABLES = {
    "MESH_LM_COORDINATOR": "node1:99",
    "MESH_LM_PROCESSES": "4",
    "MESH_LM_PROCESS_INDEX": "3",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "PATH": "",
}
EIGHT_GPUS = "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\n" for i in range(8))


def tools(directory: Path, listing: str) -> str:
    """A PATH with an nvidia-smi that prints this."""
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{listing}END\n", encoding="utf-8")
    tool.chmod(0o755)
    return str(directory)


def test_one_process_is_the_default() -> None:
    assert ProcessSlot.of(LaunchConfig(), {}) is None
    assert ProcessSlot.of(LaunchConfig(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}) is None, (
        "a batch script without srun is one process"
    )
    assert ProcessSlot.of(LaunchConfig(coordinator="a:1", processes=1, index=0), {}) is None


def test_flags_win_over_variables_and_variables_over_slurm() -> None:
    everywhere = VARIABLES | SLURM
    assert ProcessSlot.of(
        LaunchConfig(coordinator="[::1]:7", processes=2, index=0), everywhere
    ) == ProcessSlot("[::1]:7", 2, 0)
    assert ProcessSlot.of(LaunchConfig(), everywhere) == ProcessSlot("node1:99", 4, 3)
    assert ProcessSlot("[::1]:7", 2, 0).address == ("::1", 7)
    assert ProcessSlot.of(
        LaunchConfig(), VARIABLES | {"MESH_LM_LOCAL_DEVICES": "2,3"}
    ) == ProcessSlot("node1:99", 4, 3, (2, 3))


@pytest.mark.parametrize(
    ("gpus", "local", "tasks", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 0, 1, None),  # one task per node: all GPUs
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, 4, (3,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1, 2, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, 3, 4, None),  # --gpus-per-task: each task sees only its own
        ({"SLURM_GPUS_ON_NODE": "8"}, 1, 2, (4, 5, 6, 7)),
        (
            {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            1,
            2,
            (4, 5, 6, 7),
        ),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1, 2, None),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 3, 4, None),
        # the user made 4 of 8 visible: each sees all 4
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, 4, (3,)),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 4, (1,)),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, 2, 3, (4, 5)),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "2"}, 2, 4, None),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}, 2, 4, None),  # on the CPU
        ({}, 3, 4, (3,)),
        ({"SLURM_GPUS_ON_NODE": ""}, 3, 4, (3,)),
        (
            {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"},
            1,
            4,
            (1,),
        ),
        # CUDA sees the first two, which are its own
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,-1,3"}, 1, 2, None),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3,"}, 3, 4, (3,)),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "MIG-a"}, 1, 2, None),
        # as Slurm says it where a step has none
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 1, 2, None),
        ({"SLURM_GPUS_ON_NODE": "3", "JAX_PLATFORMS": "cpu"}, 1, 2, None),
    ],
)
def test_slurm_shares_the_gpus_of_a_node(
    gpus: dict[str, str], local: int, tasks: int, devices: tuple[int, ...] | None
) -> None:
    slot = ProcessSlot.of(
        LaunchConfig(),
        SLURM | gpus | {"SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)"},
    )
    assert slot is not None
    assert slot.local_devices == devices
    assert (slot.count, slot.index, slot.address[0]) == (2, 1, "n1")
    assert 61_440 <= slot.address[1] < 65_536


def test_gpus_of_which_slurm_says_nothing(tmp_path: Path) -> None:
    """Where Slurm does not manage GPUs, all tasks see all that the driver lists, unless a script
    has given each its own."""

    path = tools(tmp_path, EIGHT_GPUS)

    def devices(local: int, tasks: int, **variables: str) -> tuple[int, ...] | None:
        step = {
            "SLURM_LOCALID": str(local),
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
            "PATH": path,
        }
        slot = ProcessSlot.of(LaunchConfig(), SLURM | step | variables)
        assert slot is not None
        return slot.local_devices

    assert devices(1, 2) == (4, 5, 6, 7)
    assert devices(3, 4, CUDA_VISIBLE_DEVICES="6,7") is None
    assert devices(1, 4, CUDA_VISIBLE_DEVICES="4,5,6,7") == (1,)
    assert devices(3, 4, CUDA_VISIBLE_DEVICES="5") is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert devices(3, 4) == (3,)


def test_gpus_that_mpirun_cannot_count(tmp_path: Path) -> None:
    """A driver that fails is one error, and no matter where CUDA_VISIBLE_DEVICES says which GPUs
    there are."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    started = OPEN_MPI | {"PATH": str(tmp_path), "MASTER_ADDR": "node1"}
    with pytest.raises(
        ConfigError,
        match=r"cannot count the GPUs of .*, or set CUDA_VISIBLE_DEVICES to the GPUs of each task$",
    ):
        ProcessSlot.of(LaunchConfig(), started)
    slot = ProcessSlot.of(LaunchConfig(), started | FOUR_GPUS)
    assert slot is not None
    assert slot.local_devices == (1,)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node1-99@1",
}
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
CRAY_PALS = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PALS_APID": "7",
}
FOUR_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    "started",
    [TORCHRUN, *(mpi | {"MASTER_ADDR": "node1"} for mpi in (OPEN_MPI, INTEL_MPI, MVAPICH))],
)
@pytest.mark.parametrize("below_slurm", [False, True])
def test_other_starters_give_places(started: dict[str, str], below_slurm: bool) -> None:
    """They do so where srun has started one of them per node, too, whose tasks are not the
    processes. The variables of this project win over both."""
    environment = started | FOUR_GPUS | (SLURM if below_slurm else {})
    slot = ProcessSlot.of(LaunchConfig(), environment)
    assert slot is not None
    assert (slot.count, slot.index, slot.local_devices) == (8, 5, (1,))
    assert slot.address[0] == "node1"
    assert 61_440 <= slot.address[1] < 65_536, "torchrun itself listens at MASTER_PORT"
    assert ProcessSlot.of(LaunchConfig(), environment | VARIABLES) == ProcessSlot("node1:99", 4, 3)
    own_gpu = ProcessSlot.of(
        LaunchConfig(), environment | {"CUDA_VISIBLE_DEVICES": "3", "PATH": ""}
    )
    assert own_gpu is not None
    assert own_gpu.local_devices is None


def test_variables_of_pmi_alone() -> None:
    """Cray's PALS and other starters set them. Where `srun` sets them, too, its own are right."""
    slot = ProcessSlot.of(LaunchConfig(), CRAY_PALS | FOUR_GPUS | {"MASTER_ADDR": "node1"})
    assert slot is not None
    assert slot.count == 8
    assert slot.index == 5
    assert slot.local_devices == (1,)
    assert slot.address[0] == "node1"
    assert ProcessSlot.of(
        LaunchConfig(), SLURM | {"PMI_RANK": "0", "PMI_SIZE": "9"}
    ) == ProcessSlot.of(LaunchConfig(), SLURM)
    assert (
        ProcessSlot.of(LaunchConfig(), {"PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"}) is None
    )


def test_tasks_with_mig_devices(tmp_path: Path) -> None:
    """CUDA shows a process one of them, so that each task needs its own."""
    started = OPEN_MPI | {
        "MASTER_ADDR": "node1",
        "PATH": tools(tmp_path, "GPU 0: A100 (UUID: GPU-0)\n  MIG 3g.20gb (UUID: MIG-a)\n"),
    }
    single = ProcessSlot.of(LaunchConfig(), started | {"CUDA_VISIBLE_DEVICES": "MIG-b"})
    assert single is not None
    assert single.local_devices is None
    with pytest.raises(
        ConfigError,
        match="CUDA_VISIBLE_DEVICES=MIG-a,MIG-b: CUDA shows a process one MIG device only",
    ):
        ProcessSlot.of(LaunchConfig(), started | {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})


def test_starters_on_the_cpu_divide_no_gpus() -> None:
    slot = ProcessSlot.of(
        LaunchConfig(), TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2", "JAX_PLATFORMS": "cpu"}
    )
    assert slot is not None
    assert slot.local_devices is None


def test_starters_of_one_host_need_no_address() -> None:
    for started in (
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        INTEL_MPI | {"PMI_SIZE": "4", "PMI_RANK": "1"},
    ):
        slot = ProcessSlot.of(LaunchConfig(), started | FOUR_GPUS)
        assert slot is not None
        assert (slot.count, slot.index, slot.local_devices) == (4, 1, (1,))
        assert slot.address[0] == "127.0.0.1"
    one = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
    }
    assert ProcessSlot.of(LaunchConfig(), one) is None


def test_torchruns_variables_without_torchrun() -> None:
    """A PyTorchJob of Kubernetes sets them, one process per pod. Those that a batch script exports
    do not replace what srun says."""
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "23456"}
    assert ProcessSlot.of(LaunchConfig(), job) == ProcessSlot("[fd00::1]:23456", 2, 1)
    one_of_four = ProcessSlot.of(LaunchConfig(), job | FOUR_GPUS | {"LOCAL_RANK": "3"})
    assert one_of_four is not None
    assert one_of_four.local_devices == (3,)
    exported = SLURM | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    assert ProcessSlot.of(LaunchConfig(), exported) == ProcessSlot.of(LaunchConfig(), SLURM)
    assert ProcessSlot.of(LaunchConfig(), {"WORLD_SIZE": "8"}) is None, (
        "one variable alone says nothing of this process"
    )


def test_two_steps_of_a_job_use_two_ports() -> None:
    slots = [
        ProcessSlot.of(LaunchConfig(), SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(3)
    ]
    assert len({slot.address[1] for slot in slots if slot}) == 3


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("a,b", "a"),
        ("n[1-2]", "n1"),
        ("gpu-a[001-004,007],b", "gpu-a001"),
        ("r[1,3]-eth", "r1-eth"),
        ("x[03]", "x03"),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_tasks_here() -> None:
    assert [tasks_here("8(x2),4", node) for node in range(3)] == [8, 8, 4]


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (
            {"coordinator": "a:1"},
            {},
            (
                "launch.coordinator=a:1 is given without launch.processes and launch.index; a run "
                "of several"
            ),
        ),
        (
            {},
            {"MESH_LM_PROCESSES": "2", "MESH_LM_PROCESS_INDEX": "0"},
            "is given without MESH_LM_COORDINATOR",
        ),
        (
            {"coordinator": "a", "processes": 2, "index": 0},
            {},
            "launch.coordinator=a must be host:port of process 0, such as node1:9876",
        ),
        (
            {"coordinator": "a:1", "processes": 2, "index": 2},
            {},
            "launch.index=2 must be an index from 0 to launch.processes - 1 = 1",
        ),
        (
            {},
            VARIABLES | {"MESH_LM_PROCESSES": "four"},
            "MESH_LM_PROCESSES=four and MESH_LM_PROCESS_INDEX=3 must be integers",
        ),
        (
            {},
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_GPUS_ON_NODE": "8"},
            "8 GPUs of this node cannot be divided equally",
        ),
        (
            {},
            SLURM
            | {
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "SLURM_GPUS_ON_NODE": "4",
                "CUDA_VISIBLE_DEVICES": "0,1,2",
            },
            "3 GPUs of this node cannot be divided equally among its 2 tasks",
        ),
        (
            {},
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"},
            (
                "SLURM_NODEID=1, but SLURM_STEP_TASKS_PER_NODE=2 counts the tasks of 1 nodes, as "
                "in a step of several job components"
            ),
        ),
        (
            {},
            {"PMIX_RANK": "3"},
            (
                "PMIX_RANK=3: this process was started as one of several, but no variable says of "
                "how many; set MESH_LM_C"
            ),
        ),
        (
            {},
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            (
                "LOCAL_RANK is not set, but RANK is: torchrun gives each process an integer; unset "
                "its variables"
            ),
        ),
        (
            {},
            VARIABLES | {"MESH_LM_LOCAL_DEVICES": "GPU-a"},
            "MESH_LM_LOCAL_DEVICES=GPU-a must be numbers of GPUs as this process sees them",
        ),
        (
            {},
            {name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"}
            | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            (
                "SLURM_STEP_NUM_TASKS=2, but SLURM_LOCALID is not set; pass all of Slurm's "
                "variables on to this process, or set MESH_LM_CO"
            ),
        ),
        (
            {},
            {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"},
            "RANK=4 must be a rank from 0 to WORLD_SIZE - 1 = 3",
        ),
        (
            {},
            {"RANK": "one", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"},
            "RANK=one: torchrun gives each process an integer; unset its",
        ),
        (
            {},
            {"RANK": "1", "WORLD_SIZE": "4"},
            (
                "RANK=1 and WORLD_SIZE=4: torchrun has started this process, but does not say on "
                "which host"
            ),
        ),
        (
            {},
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=4: mpirun has started this process, "
            "but does not say on which host process 0 is; give all processes MASTER_ADDR (of Open "
            "MPI: mpirun -x MASTER_ADDR=node1), or set MESH_LM_COORDINATOR, MESH_LM_PROCESSES, "
            "MESH_LM_PROCESS_INDEX",
        ),
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
    launched = job("--nodes=2", "--node=1", "--rendezvous=[::1]:7", **(NODE | SLURM | STEP))
    assert (launched.nodes, launched.node, launched.address) == (2, 1, ("::1", 7))
    launched = job(**(SLURM | STEP))
    assert (launched.nodes, launched.node, launched.address[0]) == (2, 1, "n1")
    assert 61_440 <= launched.address[1] < 65_536
    assert job(SLURM_JOB_ID="7", SLURM_NNODES="4").nodes == 1, (
        "a batch script without srun is one node"
    )
    with pytest.raises(
        ConfigError, match="srun starts 8 launchers on 2 nodes; pass --ntasks-per-node=1"
    ):
        job(**(SLURM | STEP | {"SLURM_STEP_NUM_TASKS": "8"}))
    with pytest.raises(
        ConfigError, match="srun starts 2 launchers on 1 nodes; pass --ntasks-per-node=1"
    ):
        job(**(SLURM | STEP | {"SLURM_STEP_NUM_NODES": "1"}))  # each would train alone


def test_launchers_that_mpirun_starts_need_to_know_their_places() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^OMPI_COMM_WORLD_SIZE=8: mpirun has started this launcher as one of several, .*; "
            r"give each of"
        ),
    ):
        job(**OPEN_MPI)
    assert job(**OPEN_MPI, **NODE).nodes == 4
    assert job("--nodes=1", **OPEN_MPI).nodes == 1
    assert job(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1").nodes == 1


def test_workers_share_the_gpus_of_their_node(tmp_path: Path) -> None:
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert [job("--per-node=4").devices_of(local, eight) for local in (0, 3)] == ["0,1", "6,7"]
    assert job().devices_of(0, eight) == ""
    assert job("--per-node=2", "--devices=4").devices_of(0, eight) == ""
    assert job("--per-node=2").devices_of(1, {"PATH": str(tmp_path)}) == "", (
        "no GPU: each worker has its own CPU device"
    )
    with pytest.raises(
        ConfigError,
        match="divided equally among its 3 workers; start one worker per node, or one per GPU",
    ):
        job("--per-node=3").devices_of(0, eight)


def test_gpus_are_counted_without_jax(tmp_path: Path) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert (
        gpus_here({"CUDA_VISIBLE_DEVICES": "NoDevFiles"})
        == gpus_here({"CUDA_VISIBLE_DEVICES": "-1,0"})
        == 0
    )
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}) == 0
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-a, 3,"}) == 2
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}) == 1
    assert visible_gpus({}) is None
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-GPU-a/1/0"}) == ["MIG-GPU-a/1/0"]
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        (
            "#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA "
            "H100 80GB HBM3 (UUID: GPU-2)'\n"
        ),
        encoding="utf-8",
    )
    tool.chmod(0o755)
    assert gpus_here({"PATH": str(tmp_path)}) == 2
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    with pytest.raises(
        RuntimeError, match=f"cannot count the GPUs of {socket.gethostname()}: .*exit status 9"
    ):
        gpus_here({"PATH": str(tmp_path)})
    assert job().devices_of(0, {"PATH": str(tmp_path)}) == "", "one process takes what JAX finds"
