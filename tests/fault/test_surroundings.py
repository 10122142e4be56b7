"""F7, F9, F13, F14: a full disk, changed devices, lost data, and other faults in a run's
environment."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fault.job import STEPS, Job, arguments, certificates
from processes import ROOT

from mesh_lm.data.indexed import write_documents

pytestmark = pytest.mark.fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB. Skips if this process may not mount one."""
    (disk := tmp_path / "disk").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(
            f"no file system of a limited size can be mounted here: {mounted.stderr.strip()}"
        )
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Fills the file system."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return ballast


def test_f7_a_full_disk(
    data: Path, undisturbed: dict[int, str], small_disk: Path, tmp_path: Path
) -> None:
    """Checkpoints and metrics fail; the run continues with increasingly urgent messages, and saves
    all once there is space."""
    settings = arguments(data, small_disk / "run", checkpoint__alarm=2)
    with Job(tmp_path / "faults", settings, MESH_LM_PACE="0.5") as job:
        job.wait("step  6/")
        ballast = fill(small_disk)
        job.wait(
            r"warning: step 10 could not be saved in .*: \[Errno 28\] No space left on device; "
            r"training continues, and saving is retried "
        )
        assert (
            not [*(small_disk / "run" / "checkpoints").glob("*tmp*")] or job.process.poll() is None
        )
        job.wait(
            r"ERROR: 2 saves in a row have failed, and a crash now would lose everything "
            r"since: "
            r"the newest checkpoint is step 5\."
        )
        ballast.unlink()
        assert job.ended() == 0, job.log
    assert "Traceback" not in job.log, job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log
    rows = [
        json.loads(line)["step"]
        for line in (small_disk / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert rows[:STEPS] == [*range(1, STEPS + 1)], (
        "metrics that the disk did not take are written later"
    )


def test_f7_a_disk_that_is_full_at_the_end(data: Path, small_disk: Path, tmp_path: Path) -> None:
    """A state that cannot be saved is an error with status 75, so that a queue tries again; earlier
    checkpoints remain."""
    with Job(
        tmp_path / "faults",
        arguments(data, small_disk / "run"),
        workers=1,
        devices=4,
        MESH_LM_PACE="0.5",
    ) as job:
        job.wait("step 16/")
        fill(small_disk)
        assert job.ended() == 75, job.log
    assert re.search(
        (
            r"error: step 20 could not be saved in .*: \[Errno 28\] No space left on device; all "
            r"attempts to save this last step failed, and the newest checkpoint is step 15"
        ),
        job.log,
    ), job.log
    (small_disk / "ballast").unlink()
    with Job(tmp_path / "faults", arguments(data, small_disk / "run"), workers=1, devices=4) as job:
        assert job.ended() == 0 and "resumed at step 15 " in job.log, job.log


def test_f7_a_disk_that_is_full_at_a_start(data: Path, small_disk: Path, tmp_path: Path) -> None:
    """The launcher tries again, and the run ends with 75, so that a queue does, too; with room the
    same command trains."""
    settings = arguments(data, small_disk / "run", train__steps=5)
    ballast = fill(small_disk)
    with Job(tmp_path / "faults", settings, options=["--restarts=1"]) as job:
        assert job.ended() == 75, job.log
    assert (
        "No space left on device" in job.log
        and "restart 1 of 1" in job.log
        and "Traceback" not in job.log
    ), job.log
    ballast.unlink()
    with Job(tmp_path / "faults", settings) as job:
        assert job.ended() == 0, job.log


Layouts = list[tuple[int, int, dict[str, object], int]]
"""Processes, devices per process, the mesh, and the step at which the run moves to the next row."""
LAYOUTS: Layouts = [
    (2, 4, {"mesh.fsdp": 4}, 10),
    (1, 4, {"mesh.tensor": 2, "mesh.data": 1, "rules": "hsdp+megatron"}, 15),
    (2, 1, {"mesh.data": 1}, 20),
]
FLAT: Layouts = [
    (2, 4, {"mesh.data": 8, "mesh.fsdp": 1, "rules": "distributed"}, 10),
    (1, 4, {"mesh.tensor": 2, "mesh.fsdp": 1, "rules": "distributed+megatron"}, 15),
    (2, 1, {"mesh.data": 2, "mesh.fsdp": 1, "rules": "distributed"}, 20),
]


@pytest.mark.parametrize("layouts", [LAYOUTS, FLAT], ids=["whole", "flat"])
def test_f9_on_other_devices(
    data: Path,
    undisturbed: dict[int, str],
    undisturbed_output: Path,
    tmp_path: Path,
    layouts: Layouts,
) -> None:
    """On 8 devices in 2 processes, then 4 in 1, then 2 in 2, samples and restored weights are
    identical, and losses agree."""
    proofs: dict[int, str] = {}
    for workers, devices, mesh, until in layouts:
        changes = {name.replace(".", "__"): value for name, value in mesh.items()}
        settings = arguments(data, tmp_path / "run", **changes)
        with Job(
            tmp_path / "faults", settings, workers=workers, devices=devices, MESH_LM_PACE="0.3"
        ) as job:
            if until < STEPS:
                job.wait(f"step {until - 3:2d}/")
                job.process.terminate()
            assert job.ended() == (0 if until == STEPS else 99), job.log
        proofs |= certificates(job.log)
    samples = {step: proof.split()[-1] for step, proof in proofs.items()}
    assert samples[STEPS] == undisturbed[STEPS].split()[-1]
    np.testing.assert_allclose(
        losses(tmp_path / "run"), losses(undisturbed_output), rtol=1e-6, atol=0
    )


def losses(output: Path) -> list[float]:
    rows = [
        json.loads(line)
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture
def prefix(data: Path, tmp_path: Path) -> Path:
    """Writes a .bin and .idx of many pages of bytes."""
    tokens = np.frombuffer(data.read_bytes() * 8, np.uint8).astype(np.int64)
    write_documents(tmp_path / "bytes", np.array_split(tokens, 50), vocab=512)
    return tmp_path / "bytes"


@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_f13_data_that_vanish_in_mid_run(
    data: Path, prefix: Path, tmp_path: Path, how: str
) -> None:
    """If a file is truncated, the process dies of a bus error, which the launcher explains, and the
    next start names the file. If it is removed, it stays readable while open, and the run ends
    normally. Once the file is restored, the same command continues."""
    settings = arguments(
        data,
        tmp_path / "run",
        data__blend=prefix,
        data__tokenizer="bytes",
        train__global_batch=64,
        train__log_every=1,
    )
    whole, binary = prefix.with_suffix(".whole"), prefix.with_suffix(".bin")
    shutil.copy(binary, whole)
    with Job(tmp_path / "faults", settings, MESH_LM_PACE="0.3") as job:
        job.wait("step  7/")
        if how == "truncated":
            os.truncate(binary, 4096)
            assert job.ended() == 1, job.log
            assert re.search(r"SIGBUS.*a memory-mapped data file was truncated", job.log), job.log
            assert re.search(r"error: .*bytes\.bin", job.log), job.log
        else:
            binary.unlink()
            assert job.ended() == 0, job.log
    shutil.copy(whole, binary)
    with Job(tmp_path / "faults", settings) as job:
        assert job.ended() == 0, job.log


def test_f14_a_port_in_use(data: Path, tmp_path: Path) -> None:
    """The launcher picks free ports; a given port that is taken is named in the error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Job(
            tmp_path / "faults",
            arguments(data, tmp_path / "run"),
            options=["--nodes=2", "--node=0", f"--rendezvous=127.0.0.1:{port}"],
        ) as job:
            assert job.ended() == 1
    assert re.search(
        (
            rf"cannot listen at --rendezvous=127.0.0.1:{port}: Address already in use.*; choose a "
            r"free "
            r"port"
        ),
        job.log,
    ), job.log


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "checkpoints", "tokenizer"])
def test_f14_an_output_that_cannot_be_written(data: Path, tmp_path: Path, name: str) -> None:
    """Something else in place of an output file or directory gives one error before the first
    step."""
    (output := tmp_path / "run").mkdir()
    (output / name).mkdir() if name == "metrics.jsonl" else (output / name).write_text(
        "in the way", encoding="utf-8"
    )
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *arguments(data, output, mesh__data=1, mesh__fsdp=1),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        command,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (
        run.returncode == 1
        and "Traceback" not in run.stderr
        and "error: " in run.stderr
        and name in run.stderr
    ), run.stdout + run.stderr
