"""F18: two runs with one output. Without a lease they mix their checkpoints, and each of those
verifies."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault.job import EVERY, STEPS, WORKER, Job, arguments, certificates
from processes import ROOT, environment, wait_for

from mesh_lm.checkpoint import SavedCheckpoint
from mesh_lm.checkpoint.lease import STALE
from mesh_lm.checkpoint.reader import certificate, steps_in

pytestmark = pytest.mark.fault


def test_f18_a_second_start_on_a_live_output(
    data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """The second one is refused, with who holds the output and since when; the first one does not
    notice."""
    run = tmp_path / "run"
    with Job(tmp_path / "faults", arguments(data, run), MESH_LM_PACE="1.5") as job:
        job.wait("step  2/")
        with Job(
            tmp_path / "faults-2", arguments(data, run, optimizer__learning_rate=1e-2)
        ) as second:
            assert second.ended() == 1, second.log
        refusal = (
            rf"error: {run} is in use: process {job.pids()[0]} on \S+ since \d{{4}}-\d\d-\d\d "
            r"\d\d:\d\d:\d\d writes its checkpoints"
        )
        assert (
            re.search(refusal, second.log)
            and "restart" not in second.log
            and "Traceback" not in second.log
        ), second.log
        assert job.ended() == 0, job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 1)]
    assert not (run / ".lease").exists()


def test_f18_a_restart_after_kill_9_does_not_wait(
    data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """The launcher and all workers are killed in the middle of a save; the same command replaces
    the dead holder at once."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0-10-kill_in_save").touch()
    with Job(
        tmp_path / "faults", arguments(data, tmp_path / "run"), options=["--restarts=0"]
    ) as job:
        assert job.ended() not in (0, 99), job.log
    assert (tmp_path / "run" / ".lease").exists()
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run")) as job:
        assert job.ended() == 0, job.log
    assert "in use" not in job.log and certificates(job.log)[STEPS] == undisturbed[STEPS], job.log


def alone(data: Path, output: Path, faults: Path, **changes: Any) -> subprocess.Popen[str]:
    """One process without a launcher."""
    faults.mkdir(exist_ok=True)
    command = [
        sys.executable,
        str(WORKER),
        *arguments(data, output, launch__cpu_devices=4, health__stall=0, **changes),
    ]
    variables = environment(MESH_LM_FAULTS=str(faults))
    return subprocess.Popen(
        command,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )


def test_f18_a_suspended_run_that_was_replaced(data: Path, tmp_path: Path) -> None:
    """A run is stopped in the middle of a save, on what the second run takes for another host. The
    second one waits until the lease is stale, and ends; the first one wakes up, and neither commits
    its save nor goes on."""
    run, faults = tmp_path / "run", tmp_path / "faults"
    faults.mkdir()
    (faults / "0-10-stop_in_save").touch()
    first = alone(data, run, faults)
    try:
        wait_for(lambda: stopped(first.pid), first)
        lease = json.loads((run / ".lease").read_text(encoding="utf-8"))
        assert lease["pid"] == first.pid
        (run / ".lease").write_text(
            json.dumps(lease | {"machine": "another", "host": "node7"}), encoding="utf-8"
        )
        second = alone(data, run, tmp_path / "faults-2", optimizer__learning_rate=1e-3)
        log, _ = second.communicate(timeout=300)
        assert second.returncode == 0, log
        assert (
            f"{run} is in use by process {first.pid} on node7 since " in log
            and f"waiting up to {STALE:g} s" in log
        ), log
        assert f"resumed at step {EVERY} " in log, log
        # It is still held by a third one when the first one wakes up.
        (run / ".lease").write_text(
            json.dumps(lease | {"life": "0badcafe", "host": "node8"}).ljust(512), encoding="utf-8"
        )
        before = contents(run)
        os.kill(first.pid, signal.SIGCONT)
        late, _ = first.communicate(timeout=300)
    finally:
        first.kill()
    assert first.returncode == 77 and re.search(
        rf"error: {run} was taken over by process \d+ on node8 since .* while this run", late
    ), late
    assert "Traceback" not in late, late
    assert contents(run) == before
    assert {step: proof for step, proof in certificates(log).items() if step in before} == before


def stopped(pid: int) -> bool:
    return (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    )


def contents(run: Path) -> dict[int, str]:
    """Returns the certificates of the steps on disk."""
    saved = [
        SavedCheckpoint.read(run / "checkpoints", step) for step in steps_in(run / "checkpoints")
    ]
    return {each.step: certificate(each.metadata, each.data) for each in saved}
