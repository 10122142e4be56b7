"""`mesh-lm explain`: from the name of a collective to its source, axes and ranks, in a saved report;
names that a program lacks and reports of another jax are one error."""

import dataclasses
import json
from pathlib import Path

import lab_report
import numpy as np
import pytest

from mesh_lm.commands.explain import groups, instruction_name, lines, named
from mesh_lm.commands.main import main
from sharding_rules.lab.report import Report


def report(**versions: str) -> Report:
    """Each collective has a name of its own, as a compiler gives it."""
    made = lab_report.report()
    collectives = tuple(
        dataclasses.replace(collective, name=f"{collective.kind}-start.{number}")
        for number, collective in enumerate(made.collectives)
    )
    return dataclasses.replace(made, collectives=collectives, versions=versions)


def saved(made: Report, directory: Path) -> str:
    file = directory / "plan.json"
    file.write_text(json.dumps({"report": json.loads(made.to_json())}), encoding="utf-8")
    return str(file)


def test_from_a_name_to_source_axes_and_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report()
    file = saved(made, tmp_path)
    collective = next(c for c in made.collectives if c.axes == ("tensor",))
    assert main(["explain", f"%{collective.name}", f"--report={file}", "--rank=9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{collective.name}: {collective.kind} over tensor=8"
    facts = dict(line.strip().split("  ", 1) for line in lines[1:])
    found = {label: text.strip() for label, text in facts.items()}
    assert found["source"] == "mesh_lm/model/layers.py:107"
    assert found["part"] == "layers/attention"
    assert found["phase"] == "forward"
    assert found["runs"] == "384 times in a step: loops of 4 x 96, outermost first"
    assert found["ranks"] == "devices 8-15, with device 9"


def test_a_branch_that_not_every_device_takes_is_named_in_loops_and_outside() -> None:
    made = report()
    collective = next(one for one in made.collectives if one.loops)
    for loops, expected in (
        ((4, 96), "times in a step: loops of 4 x 96, outermost first, in a branch that not every"),
        ((), "times in a step, in a branch that not every device takes"),
    ):
        changed = dataclasses.replace(collective, loops=loops, conditional=True)
        assert any(expected in line for line in lines(made, changed))


def test_the_end_of_a_collective_is_its_start() -> None:
    made = report()
    name = made.collectives[0].name
    assert named(made, name.replace("-start", "-done")) == [made.collectives[0]]
    assert instruction_name("'jit_step/%all-reduce.3'") == "all-reduce.3"
    assert instruction_name("jit_step/all-reduce.3") == "all-reduce.3"


def test_groups_are_along_the_mesh() -> None:
    mesh = {"data": 2, "fsdp": 3, "tensor": 4}
    assert groups(mesh, ("tensor",))[0] == [0, 1, 2, 3]
    assert groups(mesh, ("data",))[1] == [1, 13]
    both = groups(mesh, ("data", "tensor"))
    assert both[0] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sorted(np.concatenate(both).tolist()) == list(range(24))


def test_names_that_a_program_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(report(), tmp_path)
    assert main(["explain", "all-gather-start.777", f"--report={file}"]) == 1
    error = capsys.readouterr().err
    assert "has no collective of the name all-gather-start.777, but" in error
    assert "did you mean all-gather-start." in error
    assert main(["explain", "all-gather-start.0", f"--report={file}", "--rank=1024"]) == 1
    assert "counted from 0, the last device of the program is 1023" in capsys.readouterr().err


def test_a_report_of_another_jax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(report(jax="0.0.1"), tmp_path)
    assert main(["explain", "all-gather-start.0", f"--report={file}"]) == 1
    assert "plan.json was made with jax 0.0.1, and this is jax" in capsys.readouterr().err
    Path(file).write_text("{}", encoding="utf-8")
    assert main(["explain", "all-gather-start.0", f"--report={file}"]) == 1
    assert "plan.json holds no report" in capsys.readouterr().err
