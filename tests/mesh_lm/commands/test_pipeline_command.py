"""`python -m mesh_lm.pipeline`: the chart on the screen, the picture, the trace."""

import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import schedules
from rich.console import Console

from mesh_lm.commands.pipeline import main
from mesh_lm.errors import ConfigError
from mesh_lm.schedules import custom, gantt, trace
from mesh_lm.schedules.cost import Durations, timeline
from mesh_lm.schedules.schedule import Schedule, make_schedule


def shown(*argv: str, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    assert main(list(argv), console) == 0
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_screen() -> None:
    """If the chart fits, a letter is one unit of time: at V=1, stage 3 runs F and B of a microbatch
    back to back, without a pause."""
    lines = shown("--stages=4", "--microbatches=8").splitlines()
    assert lines[0].startswith("1f1b: 4 stages, 8 microbatches; eager 1F1B")
    assert lines[2:7] == [
        "stage 0 F0-F1-F2-F3-......F4-......F5-......F6-B0----F7-B1----B2----...B3----...B4----...B5----B6----B7----",
        "stage 1 ...F0-F1-F2-......F3-......F4-B0----F5-B1----F6-B2----F7-B3----B4----...B5----...B6----B7----......",
        "stage 2 ......F0-F1-......F2-B0----F3-B1----F4-B2----F5-B3----F6-B4----F7-B5----B6----...B7----............",
        "stage 3 .........F0-B0----F1-B1----F2-B2----F3-B3----F4-B4----F5-B5----F6-B6----F7-B7----..................",
        f"        0{' ' * 96}33",
    ]
    assert lines[8:12] == [
        "bubble     async 37.50%   neighbour 37.50%   lockstep 37.50%   ((P-1)/(V M) = 37.50%)",
        "time       33 (lockstep), of which work 24; 14 ticks",
        "in flight  7 5 3 1   (at most, on each stage; in inputs of a virtual stage)",
        (
            "slots      5 for inputs, 1 for gradients on each stage; 7 for residuals, where they "
            "are stashed"
        ),
    ]


def test_the_comparison() -> None:
    text = shown("--stages=8", "--microbatches=64", "--chunks=4")
    table = {}
    for line in text.splitlines()[-8:]:
        words = line.split()
        if len(words) > 8:
            table[words[0], words[1]] = " ".join(words[2:])
    assert table["1f1b", "4"] == "294 2.73% 2.73% 2.73% 197.2 +0.0% 39 37 + 1"
    assert table["classic_1f1b", "1"] == "142 10.94% 43.75% 43.75% 276 +39.9% 8 8 + 1"
    assert table["zb_h1", "1"].endswith(" 8 -")
    assert set(table) == {
        ("1f1b", "4"),
        ("1f1b", "1"),
        ("gpipe", "1"),
        ("gpipe", "4"),
        ("classic_1f1b", "1"),
        ("zb_h1", "1"),
    }


def test_facts_of_the_stash_and_the_head() -> None:
    text = shown(
        "--stages=8",
        "--microbatches=64",
        "--input_mib=32",
        "--backward=3",
        "--head=0.5",
        "--drop_last_forward",
    )
    assert "slots      13 for inputs, 1 for gradients on each stage: 448 MiB\n" in text
    assert "of which work 288 on the busiest stage, 256 on the idlest" in text
    assert "for study: the engine runs no schedule that splits" in shown("--schedule=zb_h1")
    assert "in flight" not in shown("--schedule=forward")


@given(schedules(), st.integers(40, 160), st.booleans())
def test_the_chart_fits(schedule: Schedule, width: int, colour: bool) -> None:
    lines = gantt.lines(timeline(schedule, Durations()), width, colour=colour)
    chart = lines[: schedule.stages]
    assert len({len(row) for row in chart}) == 1
    assert len(chart[0]) <= width


def test_colours_tell_kinds_chunks_and_neighbours() -> None:
    schedule = make_schedule("1f1b", 4, 8, 2)
    colours = {op: gantt.colour_of(op, schedule) for op in schedule.ticks}
    n_kinds = n_chunks = n_neighbours = 2
    assert len(set(colours.values())) == n_kinds * n_chunks * n_neighbours
    row = gantt.lines(timeline(schedule, Durations()), 120)[0]
    drawn = {str(span.style).split(" on ")[-1] for span in row.spans}
    assert drawn >= {colour for op, colour in colours.items() if op.virtual == 0}


def test_a_picture(tmp_path: Path) -> None:
    png = tmp_path / "all.png"
    text = shown("--stages=2", "--microbatches=4", "--compare", f"--png={png}")
    assert f"wrote {png}" in text.replace("\n", "")
    header = png.read_bytes()[:24]
    assert header[1:4] == b"PNG"
    assert struct.unpack(">II", header[16:]) == (2000, round(200 * (4 * (0.62 + 0.2 * 2) + 0.45)))


def test_a_trace() -> None:
    """Two ops of one stage do not overlap, times are in microseconds, and an op starts after its
    inputs."""
    schedule = make_schedule("1f1b", 2, 4, 2)
    line = timeline(schedule, Durations(0.01, 0.02), "async")
    events = trace.chrome_trace([line])["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "stage 0", (0, 1): "stage 1"}
    ops = [e for e in events if e["ph"] == "X"]
    assert len(ops) == 2 * 4 * 4
    assert (ops[0]["name"], ops[0]["ts"], ops[0]["dur"]) == ("F0 chunk 0", 0, pytest.approx(5000))
    assert sum(e["dur"] for e in ops if e["tid"] == 1) == pytest.approx(4 * 30000)
    assert all(e["args"]["virtual stage"] % 2 == e["tid"] for e in ops)


def n_rows(text: str, name: str) -> int:
    """The rows of the comparison for the schedules of this name."""
    return sum(line.split()[:1] == [name] for line in text.splitlines())


def test_a_schedule_of_sizes_that_no_named_one_has(tmp_path: Path) -> None:
    """Three microbatches in two chunks are compared only with the schedules of one chunk."""
    order = []
    for stage in range(2):
        forwards = [f"{virtual}F{m}" for virtual in (stage, stage + 2) for m in range(3)]
        backwards = [f"{virtual}B{m}" for virtual in (stage + 2, stage) for m in range(3)]
        order.append(forwards + backwards)
    (tmp_path / "own.json").write_text(json.dumps({"order": order}), encoding="utf-8")
    text = shown(f"--schedule={tmp_path / 'own.json'}")
    assert text.startswith("own, 2 chunks: 2 stages, 3 microbatches")
    assert n_rows(text, "1f1b") == 1


def test_files_of_the_command(tmp_path: Path) -> None:
    schedule_file = tmp_path / "mine.csv"
    trace_file = tmp_path / "out.json"
    shown("--stages=2", "--microbatches=4", f"--csv={schedule_file}", f"--trace={trace_file}")
    assert custom.load(str(schedule_file)).ticks == make_schedule("1f1b", 2, 4).ticks
    events = json.loads(trace_file.read_text(encoding="utf-8"))["traceEvents"]
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(ends) == pytest.approx((4 + 1) * 3000)
    text = shown(f"--schedule={schedule_file}")
    assert text.startswith("mine: 2 stages, 4 microbatches")
    assert n_rows(text, "1f1b") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--schedule=1f2b"], "there is no pipeline schedule '1f2b'; did you mean '1f1b'?"),
        (["--stages=-2"], "pipeline schedule 1f1b: stages=-2 is too small; it must be at least 1"),
        (["--forward=0"], "forward=0 must be a finite time above 0"),
        (
            ["--stage=4"],
            "bad command line\n  - --stage: there is no such option; did you mean --stages?",
        ),
        (
            ["--png=nowhere/x.png"],
            "nowhere/x.png: cannot write the Gantt chart: No such file or directory",
        ),
        (
            ["--trace=nowhere/x.json"],
            "nowhere/x.json: cannot write the Chrome trace: No such file or directory",
        ),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        shown(*argv)
    assert str(error.value) == message


def test_a_mistake_is_one_line_and_status_1() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mesh_lm.pipeline", "--schedule=nope.csv"],
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (
        1,
        "",
        "error: nope.csv: cannot read the schedule: No such file or directory\n",
    )
