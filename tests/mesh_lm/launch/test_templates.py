"""The files that --template prints: their readers must be able to parse them, and the launcher must
accept their commands."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import PATIENCE
from slurm import cluster, why_not

from mesh_lm.commands.launch import main
from mesh_lm.commands.launch import parse as _parse
from mesh_lm.launch.job import VARIABLES, Job
from tests.mesh_lm.launch.launchers import DUMMY, ROOT

COMMAND = ["train.py", "--config=configs/llama3_8b.py", "--config.output=runs/my run"]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def run(*options: str, command: list[str] = COMMAND) -> str:
        assert main([*options, *command]) == 0
        return capsys.readouterr().out

    return run


def job(words: list[str], **environment: str) -> Job:
    """Returns the launcher's job for the command line of a template."""
    assert words[:3] == ["python", "-m", "mesh_lm.launch"]
    options, command = _parse(words[3:])
    assert command == COMMAND
    return Job.of(options, command, environment)


def test_slurm(printed) -> None:
    text = printed("--template=slurm", "--nodes=4", "--per-node=8", "--grace=90")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    directives = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    assert directives["nodes"] == "4"
    assert directives["ntasks-per-node"] == "1"
    assert directives["gpus-per-node"] == "8"
    assert directives["signal"] == "TERM@150"
    assert directives["mem"] == "0"
    assert "requeue" in directives
    assert "no-kill" not in directives
    assert "source .venv/bin/activate" in text.partition("\nsrun ")[0], "a place for it"
    assert not any("#" in value for value in directives.values()), (
        "sbatch would read a comment as part of the value"
    )
    (srun,) = re.findall(r"^srun --kill-on-bad-exit=0 --wait=0 (.*)$", text, re.MULTILINE)
    step = {
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NODEID": "3",
        "SLURM_STEP_NODELIST": "n[1-4]",
    }
    launched = job(shlex.split(srun), **step)
    assert launched.nodes == 4
    assert launched.node == 3
    assert launched.per_node == 8
    assert launched.grace == 90
    assert launched.address[0] == "n1"
    fewer = printed("--template=slurm", "--nodes=4", "--min-nodes=2", "--restarts=1000000")
    spare = printed(
        "--template=slurm",
        "--nodes=5",
        "--spares=1",
        "--health=quick",
        "--health-command=/bin/true --fast",
    )
    assert "#SBATCH --nodes=5\n" in spare
    assert "\n# 4 of these nodes compute" in spare
    assert "#SBATCH --no-kill" in spare
    step |= {"SLURM_STEP_NUM_NODES": "5", "SLURM_STEP_NUM_TASKS": "5"}
    launched = job(
        shlex.split(spare.partition("--wait=0 --no-kill ")[2].partition("\n")[0]),
        PATH="/bin",
        **step,
    )
    assert launched.nodes == 5
    assert launched.size == 4
    assert launched.spares == 1
    assert launched.health == "quick"
    assert launched.health_command == "/bin/true --fast"
    assert "#SBATCH --nodes=10\n" in printed("--template=slurm", "--spares=2"), "8 that compute"
    assert "#SBATCH --no-kill" in fewer
    assert "--wait=0 --no-kill python" in fewer
    assert "--restarts=1000000" in fewer


def test_slurm_requeues_what_was_preempted_or_an_accident(printed, tmp_path) -> None:
    """Runs the script itself, with stand-ins for Slurm's commands."""
    text = printed("--template=slurm", "--nodes=1")
    for status, n_requeues, requeued in (
        (0, "", False),
        (1, "", False),
        (2, "", False),
        (75, "", True),
        (137, "19", True),
        (75, "20", False),
        (99, "", True),
        (99, "20", True),
    ):
        (tmp_path / "srun").write_text(
            f"#!/bin/sh\necho $MESH_LM_SECRET >> {tmp_path}/secrets\nexit {status}\n",
            encoding="utf-8",
        )
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho $@\n", encoding="utf-8")
        for name in ("srun", "scontrol"):
            (tmp_path / name).chmod(0o755)
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "17",
            "SLURM_RESTART_COUNT": n_requeues,
        }
        ran = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
        assert ran.returncode == status
        assert ran.stdout == ("requeue 17\n" if requeued else "")
    secrets = (tmp_path / "secrets").read_text(encoding="utf-8").split()
    assert len({*secrets}) == len(secrets) == 8
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets), (
        "each start has a secret of its own"
    )


@pytest.mark.slow
def test_slurm_for_real(printed, tmp_path: Path) -> None:
    """A preempted job requeues itself, and its workers are restarted."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    for name in ("notes", "slurm"):
        (tmp_path / name).mkdir()
    text = printed(
        "--template=slurm", "--nodes=2", command=[str(DUMMY), str(tmp_path / "notes"), "wait"]
    )
    lines = text.splitlines(keepends=True)
    lines = [line for line in lines if "--gpus" not in line and "--exclusive" not in line]
    (tmp_path / "job.sh").write_text("".join(lines), encoding="utf-8")
    with cluster(tmp_path / "slurm") as environment:
        environment |= {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        }

        def slurm(*command: str) -> str:
            return subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
            ).stdout

        job_id = slurm("sbatch", "--parsable", "job.sh").strip()
        log = tmp_path / f"mesh_lm-{job_id}.log"
        life = tmp_path / "notes" / "life-1-1"

        def wait_for(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + PATIENCE
            while not condition():
                assert time.monotonic() < deadline, log.read_text(encoding="utf-8") + slurm(
                    "scontrol", "show", "job", job_id
                )
                time.sleep(0.2)

        wait_for(life.exists)
        life.unlink()
        slurm("scancel", "--signal=TERM", job_id)

        def is_requeued() -> bool:
            status = slurm("scontrol", "show", "job", job_id)
            return "JobState=PENDING" in status and "Restarts=1" in status

        wait_for(is_requeued)
        assert log.read_text(encoding="utf-8").count("Exited with exit code 99") == 2
        # Slurm would wait for two minutes. slurmd refuses a credential that is not at least a
        # second younger than the one it has revoked.
        time.sleep(3)
        slurm("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        wait_for(life.exists)


def test_jobset(printed) -> None:
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load(printed("--template=jobset", "--nodes=3", "--per-node=2", "--gpus=4"))
    assert jobset["kind"] == "JobSet"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    spare = printed("--template=jobset", "--nodes=3", "--spares=1")
    assert "completions: 3\n" in spare
    assert '"--spares=1"' in spare
    assert (
        yaml.safe_load(spare)["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 3
    )
    assert spec["parallelism"] == spec["completions"] == 3
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 150
    assert {
        entry["key"]: entry["tolerationSeconds"] for entry in pod["tolerations"]
    } == dict.fromkeys(("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"), 30)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
    variables = {entry["name"]: entry.get("value", "2") for entry in container["env"]}
    assert {*variables} == {*VARIABLES.values(), "MESH_LM_SECRET"}
    (secret,) = [entry for entry in container["env"] if entry["name"] == "MESH_LM_SECRET"]
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "mesh-lm", "key": "secret"}}
    host = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    launched = job(container["command"], **variables)
    assert launched.nodes == 3
    assert launched.node == 2
    assert launched.per_node == 2
    assert launched.rendezvous == f"{host}:9876"
    assert launched.start == launched.rejoin == 1800
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [1, 2], "Ignore": [99]}


@pytest.mark.parametrize(
    ("name", "base", "extra"),
    [
        ("dockerfile", "ghcr.io/nvidia/jax:jax", "data"),
        ("dockerfile-pip", "python:3.11-slim", "cuda13"),
    ],
)
def test_containers(printed, name: str, base: str, extra: str) -> None:
    text = printed(f"--template={name}", "--per-node=8")
    lines = re.sub(r"\\\n", "", text).splitlines()
    assert f"FROM {base}" in lines
    assert extra in text
    assert {line.split()[0] for line in lines} <= {
        "#",
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENTRYPOINT",
        "CMD",
    }
    start, default = (
        json.loads(line.split(" ", 1)[1])
        for line in lines
        if line.startswith(("ENTRYPOINT", "CMD"))
    )
    assert job([*start, *default]).per_node == 8
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n"], input=line[4:], text=True, check=True)
