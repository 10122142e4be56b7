"""F21: a device computes one step wrongly. No replica has to exist: the step is made twice, and the bits of every shard are compared."""

import re
from pathlib import Path
from typing import Any

import pytest
from fault.job import Job, arguments, certificates

pytestmark = pytest.mark.fault
STEPS = 10
CASES = {
    "ddp": (1, {"mesh__data": 4, "mesh__fsdp": 1}),
    "fsdp": (2, {"mesh__data": 1, "mesh__fsdp": 4}),
    "distributed": (1, {"mesh__data": 4, "mesh__fsdp": 1}),
}
"""Rules -> processes, and mesh."""


@pytest.mark.parametrize("rules", CASES)
def test_f21_a_flipped_bit_in_a_replayed_step(rules: str, data: Path, tmp_path: Path) -> None:
    """The replayed step 8 of 10 has one wrong bit on one device: it is named, nothing is saved, and the run resumes from 5."""
    processes, mesh = CASES[rules]
    common: dict[str, Any] = {"rules": rules, "train__steps": STEPS, "health__stall": 60, "health__heartbeat": 60, **mesh}
    where: dict[str, Any] = {"workers": processes, "devices": 4 // processes, "options": ["--heartbeat=60"]}  # a busy machine is no fault
    with Job(tmp_path / "faults", arguments(data, tmp_path / "undisturbed", **common), **where) as job:
        assert job.ended() == 0, job.log
    undisturbed = certificates(job.log)[STEPS]
    (tmp_path / "faults" / f"{processes - 1}-8-miscompute").touch()
    settings = arguments(data, tmp_path / "run", health__replay_every=4, launch__deterministic=True, **common)
    with Job(tmp_path / "faults", settings, **where) as job:
        assert job.ended() == 0, job.log
    assert "step 8 was made twice from the same state and batch, and the results differ" in job.log, job.log
    assert set(re.findall(r"- device \d+ \(process (\d) on \S+, \S+\): mu/", job.log)) == {str(processes - 1)}, job.log
    assert len(set(re.findall(r"- device (\d+) ", job.log))) == 1 and "resumed at step 5 " in job.log, job.log
    assert certificates(job.log)[STEPS] == undisturbed, job.log
