"""F21: a device computes one step wrongly. No replica has to exist: the step is made twice, and the bits of every shard are compared."""

import re
from pathlib import Path
from typing import Any

import pytest
from fault.job import Job, arguments, certificates

pytestmark = pytest.mark.fault
MESHES = {
    "ddp": {"mesh__data": 4, "mesh__fsdp": 1},
    "fsdp": {"mesh__data": 1, "mesh__fsdp": 4},
    "distributed": {"mesh__data": 4, "mesh__fsdp": 1},
}


STEPS = 10
PATIENT: dict[str, Any] = {"health__stall": 60, "health__heartbeat": 60}
"""No hang is expected: a busy machine is none."""


@pytest.mark.parametrize("rules", MESHES)
def test_f21_a_flipped_bit_in_a_replayed_step(rules: str, data: Path, tmp_path: Path) -> None:
    """The replayed step 8 of 10 has one wrong bit on one device of process 1: it is named, nothing is saved, and the run resumes from 5."""
    common: dict[str, Any] = {"rules": rules, "train__steps": STEPS, **MESHES[rules], **PATIENT}
    with Job(tmp_path / "faults", arguments(data, tmp_path / "undisturbed", **common), options=["--heartbeat=60"]) as job:
        assert job.ended() == 0, job.log
    undisturbed = certificates(job.log)[STEPS]
    (tmp_path / "faults" / "1-8-miscompute").touch()
    settings = arguments(data, tmp_path / "run", health__replay_every=4, launch__deterministic=True, **common)
    with Job(tmp_path / "faults", settings, options=["--heartbeat=60"]) as job:
        assert job.ended() == 0, job.log
    assert "step 8 was made twice from the same state and batch, and the results differ" in job.log, job.log
    (device,) = set(re.findall(r"- device (\d+) \(process 1 on \S+, \S+\): mu/", job.log))
    assert "resumed at step 5 " in job.log and "(process 0 on" not in job.log, (device, job.log)
    assert certificates(job.log)[STEPS] == undisturbed, job.log
