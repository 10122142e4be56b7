"""Digests and the comparison of replicas across processes: each process gets the same result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ended

from mesh_lm.network.wire import free_port

WORKER = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
def test_all_processes_get_the_same() -> None:
    root, port = Path(__file__).parents[3], str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(root)}
    streams = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pair = [
        subprocess.Popen([sys.executable, WORKER, str(n), port], env=environment, **streams)
        for n in range(2)
    ]
    said = [ended(process) for process in pair]
    results = [
        json.loads(line.removeprefix("RESULT "))
        for text in said
        for line in text.splitlines()
        if line.startswith("RESULT ")
    ]
    assert len(results) == 2 and results[0] == results[1], said
    assert (
        results[0]["digests"] == dict.fromkeys(("copied", "cut", "parts"), results[0]["host"])
        and results[0]["well"] == []
    )
    copied, parts = results[0]["sick"]
    assert (
        copied.startswith("copied: device ")
        and "(process 1, " in copied
        and copied.endswith("differs from the 3 other replicas")
    )
    assert (
        parts.startswith("parts: device ")
        and "(process 0, " in parts
        and "(process 1, " in parts
        and parts.endswith("which are right")
    )
