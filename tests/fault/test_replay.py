"""F21: a device computes one step wrongly. No replica has to exist: the step is made twice, and the bits of every shard are compared."""

import re
from pathlib import Path

import pytest
from fault.job import STEPS, Job, arguments, certificates

pytestmark = pytest.mark.fault
MESHES = {
    "ddp": {"mesh__data": 4, "mesh__fsdp": 1},
    "fsdp": {"mesh__data": 1, "mesh__fsdp": 4},
    "distributed": {"mesh__data": 4, "mesh__fsdp": 1},
}


@pytest.mark.parametrize("rules", MESHES)
def test_f21_a_flipped_bit_in_a_replayed_step(rules: str, data: Path, tmp_path: Path) -> None:
    """The replayed step 8 of 20 has one wrong bit on one device of process 1: it is named, nothing is saved, and the run resumes from 5."""
    plain = arguments(data, tmp_path / "undisturbed", rules=rules, **MESHES[rules])
    with Job(tmp_path / "faults", plain) as job:
        assert job.ended() == 0, job.log
    undisturbed = certificates(job.log)[STEPS]
    (tmp_path / "faults" / "1-8-miscompute").touch()
    settings = arguments(data, tmp_path / "run", rules=rules, health__replay_every=4, launch__deterministic=True, **MESHES[rules])
    with Job(tmp_path / "faults", settings) as job:
        assert job.ended() == 0, job.log
    assert "step 8 was made twice from the same state and batch, and the results differ" in job.log, job.log
    (device,) = set(re.findall(r"- device (\d+) \(process 1 on \S+, \S+\): mu/", job.log))
    assert "resumed at step 5 " in job.log and "(process 0 on" not in job.log, (device, job.log)
    assert certificates(job.log)[STEPS] == undisturbed, job.log
