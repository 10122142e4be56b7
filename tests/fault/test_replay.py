"""F21: a device computes one step wrongly. No replica has to exist: the step is made twice, and the
bits of every shard are compared."""

import re
from pathlib import Path
from typing import Any

import pytest
from fault.job import Job, arguments, certificates
from replayed import Calls, flipped, sharded, trainer

from mesh_lm.training.replay import StepsDiffer

pytestmark = pytest.mark.fault
COMPILE_BUDGET = 40
STEPS = 10
MESH: dict[str, Any] = {"rules": "fsdp", "mesh__data": 1, "mesh__fsdp": 4}


def test_f21_a_wrong_bit_in_a_replayed_step(data: Path, tmp_path: Path) -> None:
    """FSDP on two processes. Step 8 of 10 has one wrong bit on one device: it is named, nothing is
    saved, and the run resumes from 5."""
    common: dict[str, Any] = {
        **MESH,
        "train__steps": STEPS,
        "health__stall": 60,
        "health__heartbeat": 60,
    }
    patient = ["--heartbeat=60"]  # a busy machine is no fault
    with Job(
        tmp_path / "faults", arguments(data, tmp_path / "undisturbed", **common), options=patient
    ) as job:
        assert job.ended() == 0, job.log
    undisturbed = certificates(job.log)[STEPS]
    (tmp_path / "faults" / "1-8-miscompute").touch()
    settings = arguments(
        data, tmp_path / "run", health__replay_every=4, launch__deterministic=True, **common
    )
    with Job(tmp_path / "faults", settings, options=patient) as job:
        assert job.ended() == 0, job.log
    assert (
        "step 8 was made twice from the same state and batch, and the results differ" in job.log
    ), job.log
    assert set(re.findall(r"- device \d+ \(process (\d) on \S+, \S+\): mu/", job.log)) == {"1"}, (
        job.log
    )
    assert (
        len(set(re.findall(r"- device (\d+) ", job.log))) == 1 and "resumed at step 5 " in job.log
    ), job.log
    assert certificates(job.log)[STEPS] == undisturbed, job.log


@pytest.mark.parametrize("rules", ["ddp", "distributed"])
def test_f21_a_wrong_bit_under_other_rules(rules: str) -> None:
    """In one process with four devices, in the first and in the second run of the step; without a
    fault, nothing is reported."""
    part, name = sharded(Calls(lambda: trainer(rules)[2]).train(rules, 2))
    for call in (1, 2):
        calls = Calls(
            lambda: trainer(rules)[2],
            lambda n, state, call=call: flipped(state, part, name, 2) if n == call else state,
        )
        with pytest.raises(
            StepsDiffer, match=rf"device 2 \(process 0 on \S+, cpu:2\): {part}/{re.escape(name)}\n"
        ):
            calls.train(rules, 2)
