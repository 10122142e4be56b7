"""F16: the launcher's batch script on a real two-node Slurm is preempted and requeued during a
run."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from fault.job import STEPS, WORKER, arguments, certificates
from processes import PATIENCE, environment
from slurm import cluster, why_not

pytestmark = pytest.mark.fault


class Batch:
    def __init__(self, directory: Path, environment: Mapping[str, str], command: list[str]) -> None:
        """command: the command that the launchers of two nodes start."""
        template = [
            sys.executable,
            "-m",
            "mesh_lm.launch",
            "--template=slurm",
            "--nodes=2",
            "--grace=60",
            *command,
        ]
        script = subprocess.run(
            template, env=environment, capture_output=True, text=True, check=True
        ).stdout
        # this cluster has none
        lines = [line for line in script.splitlines() if "gpus-per-node" not in line]
        text = "\n".join(lines).replace(
            "python -m mesh_lm.launch", f"{sys.executable} -m mesh_lm.launch --devices=2"
        )
        (directory / "job.sh").write_text(text + "\n", encoding="utf-8")
        self._environment, self._directory = environment, directory
        submitted = self.run("sbatch", "--parsable", "--time=30", str(directory / "job.sh"))
        self.job = submitted.strip()

    def run(self, *command: str) -> str:
        return subprocess.run(
            command,
            env=self._environment,
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    @property
    def log(self) -> str:
        path = self._directory / f"mesh_lm-{self.job}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def state(self) -> str:
        return next(
            (
                line.split("=")[1].split()[0]
                for line in self.run("scontrol", "show", "job", self.job).splitlines()
                if "JobState" in line
            ),
            "",
        )

    def wait(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.log.count(text) < count:
            assert time.monotonic() < deadline, (
                f"{text!r} not {count} times ({self.state}) in\n{self.log}"
            )
            if self.state == "PENDING":  # Slurm lets a requeued job wait for two minutes
                time.sleep(4)  # and fails a job that starts in the second in which it was requeued
                subprocess.run(
                    ["scontrol", "update", f"JobId={self.job}", "StartTime=now"],
                    env=self._environment,
                    capture_output=True,
                )
            time.sleep(0.3)


def test_f16_slurm(data: Path, undisturbed: dict[int, str], tmp_path: Path) -> None:
    """On TERM from --signal the run saves, exits with 99 and is requeued by the script; `scontrol
    requeue` works without the script."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "faults").mkdir()
    (directory := tmp_path / "slurm").mkdir()
    with cluster(directory) as slurm:
        variables = environment(MESH_LM_FAULTS=str(tmp_path / "faults"), MESH_LM_PACE="0.3") | {
            name: slurm[name] for name in ("SLURM_CONF", "PATH")
        }
        batch = Batch(tmp_path, variables, [str(WORKER), *arguments(data, tmp_path / "run")])
        batch.wait("step  7/")
        batch.run("scancel", "--signal=TERM", batch.job)
        batch.wait("stopped by SIGTERM after step")
        batch.wait("resumed at step")
        batch.wait("step 13/")
        batch.run("scontrol", "requeue", batch.job)
        batch.wait("resumed at step", 2)
        batch.wait(f"saving step {STEPS} ")
        deadline = time.monotonic() + PATIENCE
        while batch.state not in ("COMPLETED", "FAILED"):
            assert time.monotonic() < deadline, batch.log
            time.sleep(0.3)
        assert batch.state == "COMPLETED", batch.log
    assert certificates(batch.log)[STEPS] == undisturbed[STEPS], batch.log
