"""All processes of a run lower the same programs, whatever the order of their sets, and compare
them before the first call."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some
from jax.experimental.custom_partitioning import custom_partitioning
from lowered_programs import CONFIGURATIONS
from processes import PATIENCE, ROOT, environment

from mesh_lm.distributed import processes
from mesh_lm.errors import ConfigError
from mesh_lm.training import one_program
from pallas_kernels import flash_attention

COMPILE_BUDGET = 3
SCRIPT = ROOT / "tests" / "lowered_programs.py"
ALL = tuple(CONFIGURATIONS)
_FEW = ("zero3-stages", "experts-zero3")
"""Those of CI: what a layer or a stage gathers is chosen by name."""


def _texts(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("names", some([_FEW, ALL], [_FEW]))
def test_a_program_does_not_depend_on_the_order_of_sets(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """The order of a set of strings follows PYTHONHASHSEED, which Python chooses anew for each
    process."""
    seeds = ("1", "2")
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / seed), *names],
            env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", PYTHONHASHSEED=seed),
        )
        for seed in seeds
    ]
    assert [process.wait(PATIENCE) for process in running] == [0, 0]
    first, second = (_texts(tmp_path / seed) for seed in seeds)
    n_islands = sum(bool(CONFIGURATIONS[name].diloco.outer_steps) for name in names)
    assert len(first) == 2 * len(names) - n_islands
    assert [name for name in first if first[name] != second[name]] == []


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """This process is the first of two. The list has what the other one answers to each gather;
    None: the same as this one."""
    answers: list[Any] = []

    def gather(value: Any) -> list[Any]:
        answer = answers.pop(0) if answers else None
        return [value, value if answer is None else answer]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather_from_all", gather)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    yield answers


def test_the_processes_compare_a_program_once_and_lower_it_once(two_processes: list[Any]) -> None:
    durations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **about: durations.append(f"{event} {about.get('fun_name')}")
    )
    program = one_program.compared("the training step", jax.jit(lambda x: x + 1))
    x = jnp.asarray(np.zeros(3, np.float32))
    durations.clear()
    for n in range(1, 3):
        x = program(x)
        np.testing.assert_array_equal(x, n)
    stages = [event.split("/")[-1].partition(" ")[0] for event in durations if "<lambda>" in event]
    assert sorted(stages) == [
        "backend_compile_duration",
        "jaxpr_to_mlir_module_duration",
        "jaxpr_trace_duration",
    ]


def test_processes_with_different_programs_are_told_apart(two_processes: list[Any]) -> None:
    program = jax.jit(lambda x: x + 1)
    x = np.zeros(3, np.float32)
    mine = one_program.digest(program.lower(x))
    others = one_program.digest(jax.jit(lambda x: x + 2).lower(x))
    two_processes += [None, [others, "node2"]]  # no error, another digest
    with pytest.raises(ConfigError) as raised:
        one_program.compared("the training step", program)(x)
    assert str(raised.value) == (
        f"the processes do not agree on the program of the training step: {mine} on process 0 on "
        f"node1, {others} on process 1 on node2; sort the sets over which the model's code "
        "iterates, or set PYTHONHASHSEED=0 on all hosts"
    )


def test_a_process_that_cannot_lower_a_program_ends_all(two_processes: list[Any]) -> None:
    two_processes.append(["mistake", "its model is wrong"])
    with pytest.raises(ConfigError, match="process 1: its model is wrong"):
        one_program.compared("the training step", jax.jit(lambda x: x + 1))(np.zeros(3, np.float32))


def test_a_single_process_compares_nothing() -> None:
    program = jax.jit(lambda x: x + 1)
    assert one_program.compared("the training step", program) is program


def test_addresses_of_functions_are_no_difference() -> None:
    """A function with custom partitioning, such as attention of cuDNN, is called by its address."""

    def partitioned() -> Any:
        f = custom_partitioning(lambda x: x + 1)
        f.def_partition(
            partition=lambda mesh, args, out: (mesh, lambda x: x + 1, out, args),
            sharding_rule="i -> i",
        )
        return jax.jit(f)

    x = jax.ShapeDtypeStruct(
        (8,), np.float32, sharding=jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
    )
    # otherwise the second could have the first one's address
    kept: list[Any] = [partitioned() for _ in range(2)]
    lowered = [each.lower(x) for each in kept]
    first, second = (each.as_text() for each in lowered)
    assert "CustomSPMDPartitioning" in first
    assert first != second
    assert one_program.digest(lowered[0]) == one_program.digest(lowered[1])


@pytest.mark.slow
def test_directories_of_the_code_are_no_difference() -> None:
    """A kernel of ours is part of the text, with the paths of its source files; beside it,
    everything counts."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, platform="gpu", capability=(9, 0), implementation="mosaic")

    jax.config.update("jax_traceback_in_locations_limit", 10)  # as in a run; tests have none
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    text = jax.jit(attend).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    path = "pallas_kernels/attention/hopper/forward.py"
    assert path in text and path not in one_program.comparable(text)
    assert "kernel_flops" in one_program.comparable(text)
