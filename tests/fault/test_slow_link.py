"""A slow link between two hosts is found by `mesh-lm bench comm`: its axis, and its bandwidth."""

import subprocess
import sys
from pathlib import Path

import pytest
from fault.hosts import throttle
from processes import ROOT, ended, environment

from sharding_rules.lab.profile import load_profile

pytestmark = pytest.mark.fault
RATE = 50e6 / 8
"""Bytes/s of the link, frames included."""
PAYLOAD = 1448 / 1514
"""Share of a frame of Ethernet that TCP carries."""
DEVICES = 2
"""Of each host. Their groups along `data` share the link."""


def test_the_fit_finds_a_slow_link(hosts: tuple[str, str], tmp_path: Path) -> None:
    for i, host in enumerate(hosts):
        throttle(host, i, "50mbit")
    processes = []
    for i, host in enumerate(hosts):
        variables = {
            "MESH_LM_COORDINATOR": "10.77.0.1:9876",
            "MESH_LM_PROCESSES": "2",
            "MESH_LM_PROCESS_INDEX": str(i),
            "MESH_LM_NODE": str(i),
            "MESH_LM_SECRET": "the secret of this test",
        }
        words = [
            *("ip", "netns", "exec", host, sys.executable, "benchmarks/comm.py"),
            *("--mesh=data=2,tensor=2", f"--devices={DEVICES}", "--seconds=0.3"),
            *("--sizes=64KiB,256KiB", "--kinds=all-reduce,reduce-scatter"),
            f"--output={tmp_path / str(i)}",
        ]
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    outputs = [ended(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)

    profile = load_profile(str(tmp_path / "0" / "profile.json"))
    by_axis = {
        axis: [one for one in profile.collectives if one.axis == axis]
        for axis in ("data", "tensor")
    }
    expected = RATE * PAYLOAD / DEVICES
    for one in by_axis["data"]:
        assert (one.group, one.nodes) == (2, 2)
        assert one.fit.bytes_per_s == pytest.approx(expected, rel=0.1), one
    for one in by_axis["tensor"]:
        assert one.nodes == 1
        assert one.fit.bytes_per_s > 10 * expected, one
    rate = profile.link_rates()["all-reduce", "network"]
    assert rate.bytes_per_s == pytest.approx(expected, rel=0.1)
