"""F1 to F5, F10, F12, F14: a launched run of two processes is killed, stopped, hung and given bad
data, and ends with the same bits."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault.conftest import saved_by
from fault.job import EVERY, FIELDS, HEARTBEAT, STALL, STEPS, Job, arguments, certificates

from mesh_lm.checkpoint import SavedCheckpoint

pytestmark = pytest.mark.fault
NOTICED = HEARTBEAT + 5
"""Seconds after a fault within which the run must train again."""


@pytest.fixture
def broken(
    data: Path,
    undisturbed_runs: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> Callable[..., Job]:
    """Returns a function that runs with faults ("process-step-what") and compares the end with the
    undisturbed run of these rules."""

    def run(*faults: str, restarts: int, **changes: object) -> Job:
        undisturbed = saved_by(undisturbed_runs(str(changes.get("rules", FIELDS["rules"]))))
        variables = {name: str(changes.pop(name)) for name in [*changes] if name.isupper()}
        (tmp_path / "faults").mkdir()
        for fault in faults:
            (tmp_path / "faults" / fault).touch()
        with Job(
            tmp_path / "faults", arguments(data, tmp_path / "run", **changes), **variables
        ) as job:
            assert job.ended() == 0, job.log
        assert not [*(tmp_path / "faults").glob("*-*-*")], "a fault did not strike"
        assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log
        assert len(re.findall(r"parameters, .* tokens a step", job.log)) == restarts + 1, job.log
        record_property("restarts", restarts)
        return job

    return run


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("rules", ["hsdp", "distributed+hsdp"])
def test_f1_kill_9_in_an_async_save(broken: Callable[..., Job], rules: str, delay: float) -> None:
    """At any moment of a save, the step is either complete or absent."""
    broken("0-10-kill_in_save", restarts=1, rules=rules, MESH_LM_DELAY=delay)


def test_f2_kill_9_of_a_worker_and_of_the_coordinator(broken: Callable[..., Job]) -> None:
    broken("1-7-kill", "0-13-kill", restarts=2)


def test_f3_kill_9_of_a_peer_between_save_and_commit(broken: Callable[..., Job]) -> None:
    """With JAX alone the surviving process would hang in the save's barrier or in its next
    collective."""
    job = broken("1-10-kill_in_save", restarts=1)
    killed = job.wait(r"SIGKILL")
    assert job.wait("resumed at step 5") > killed


def test_f4_a_stopped_worker(data: Path, undisturbed: dict[int, str], tmp_path: Path) -> None:
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run"), MESH_LM_PACE="0.2") as job:
        job.wait("step  7/")
        stopped = time.monotonic()
        os.kill(job.pids()[1], signal.SIGSTOP)
        noticed = job.wait("generation 2|restart", 1)
        assert job.ended() == 0, job.log
    assert noticed - stopped < NOTICED, job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log


def test_f5_sigterm(data: Path, undisturbed: dict[int, str], tmp_path: Path) -> None:
    """All processes save the same step and exit with 99; the same command then ends with the
    undisturbed result."""
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run"), MESH_LM_PACE="0.2") as job:
        job.wait("step  7/")
        job.process.send_signal(signal.SIGTERM)
        assert job.ended() == 99, job.log
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+)", job.log)
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run")) as job:
        assert job.ended() == 0, job.log
    assert f"resumed at step {step} " in job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log


def test_f10_not_a_number(data: Path, tmp_path: Path) -> None:
    """A batch with a NaN loss is skipped, counted and reported; the weights stay those from before
    it."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / f"0-{16 * 7}-nan").touch()
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run"), workers=1, devices=4) as job:
        assert job.ended() == 0, job.log
    assert "step 7 skipped, 1 in all: loss nan" in job.log, job.log
    assert re.search(r"step 20/20  loss \d.* skipped 1 ", job.log), job.log


def test_f10_too_many_in_a_row(data: Path, tmp_path: Path) -> None:
    """Both processes roll back to the checkpoint before the bad batches and continue with the
    batches after them."""
    (tmp_path / "faults").mkdir()
    for process, batch in ((0, 7), (1, 8), (0, 9)):
        (tmp_path / "faults" / f"{process}-{16 * batch}-nan").touch()
    settings = arguments(
        data, tmp_path / "run", health__skip_limit=3, health__rewinds=1, checkpoint__keep=9
    )
    with Job(tmp_path / "faults", settings) as job:
        assert job.ended() == 0, job.log
    assert (
        "3 steps in a row skipped, 7 to 9: rolling back to the checkpoint before step 7" in job.log
    ), job.log
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 1)] and rows[-2][
        "skipped"
    ] == 0
    assert all(row.get("tokens_per_s", 1) > 0 for row in rows)
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {"5", "7", "10", "15", "20"}, (
        "saved again as soon as a step is known to be good"
    )
    assert SavedCheckpoint.read(tmp_path / "run" / "checkpoints", STEPS).data["position"] == 16 * (
        STEPS + 5
    ), "ten batches were read to step 10, and the run resumed from step 5"


def test_f10_one_flipped_bit_in_one_copy_of_the_weights(
    data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """The comparison before a save names the device; nothing is saved, and the run resumes from the
    last checkpoint."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "1-10-flip").touch()
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run", health__replicas=EVERY)) as job:
        assert job.ended() == 0, job.log
    assert re.search(r"params/\S+.*device \d+ \(process 1", job.log), job.log
    assert "resumed at step 5 " in job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log


def test_f12_a_stuck_worker(broken: Callable[..., Job]) -> None:
    """A process that sends heartbeats but does not step would block JAX forever; the watchdog dumps
    all stacks and ends it."""
    job = broken("1-7-hang", restarts=1)
    assert re.search(rf"error: no progress for \d+ s \(limit {STALL}\): phase step", job.log), (
        job.log
    )
    assert "in after_step" in job.log, "the stack of the stuck thread"


def test_f14_a_clock_that_jumps(broken: Callable[..., Job]) -> None:
    broken("0-7-yesterday", "1-12-yesterday", restarts=0)
