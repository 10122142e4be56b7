"""The report on one screen."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import lab_report
import pytest
from lab_report import GIB, MIB
from rich.console import Console

from sharding_rules.lab.fixes import Fix
from sharding_rules.lab.lint import Finding
from sharding_rules.lab.report import Location, Report
from sharding_rules.lab.summary import duration, flop, percent, size
from sharding_rules.lab.text import LINES, screen

FINDING = Finding(
    "f32 collective",
    402 * MIB,
    Location("loss", "forward", "loss.py:31"),
    "moves f32 in a bf16 program",
    "cast it before",
)


def shown(report: Report, width: int = 110, *, colours: bool = False, **other: Any) -> str:
    console = Console(
        width=width, force_terminal=colours, color_system="truecolor" if colours else None
    )
    with console.capture() as captured:
        console.print(screen(report, **other))
    return captured.get()


def test_one_screen_says_it_all() -> None:
    report = lab_report.report()
    fix = Fix("remat", "--config.model.remat=full", report, 6 * GIB, 1.21)
    text = shown(report, findings=[FINDING], fixes=[fix], facts=[("parameters", "174.6 B")])
    lines = text.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= 110 and "\x1b" not in text
    assert " ".join(lines[0].split()) == "gpt_175b on 1,024 x H100 fits, 70.84 GiB free"
    row = {line.split()[0]: line for line in reversed(lines) if line.strip()}
    assert "data 8 x fsdp 16 x tensor 8" in row["mesh"] and "parameters 174.6 B" in row["mesh"]
    assert "3.38" in next(line for line in lines if line.startswith("moments"))
    assert (
        "2 x bf16[12288,6144]" in text
        and "recompute of layers/mlp (mesh_lm/model/layers.py:107)" in text
    )
    assert "state.params.blocks.mlp.up.weight, sharded over fsdp+tensor" in text
    assert (
        row["tensor,"].split()[:3] == ["tensor,", "NVLink", "all-gather"]
        and "2,304" in row["tensor,"]
        and "189.00" in row["tensor,"]
    )
    assert "attention, mlp: fwd+recompute+bwd" in row["tensor,"]
    assert row["data,"].split()[1:] == [
        "network",
        "all-reduce",
        "f32",
        "1",
        "5.00",
        "8.75",
        "250",
        "µs",
        "optimizer",
    ]
    # of four collectives
    assert "1,536   144.00    126.00     1 ms  attention, mlp: fwd+bwd" in text
    assert "335.0 TFLOP in all" in row["matmuls"]
    assert "6.01 to 9.02 s predicted, never measured: compute 4.51 s" in row[
        "step"
    ] and "1.5 s exposed (25 %), MFU 3 to 4 %" in " ".join(text.split())
    assert "f32 collective: moves f32 in a bf16 program" in text and "fix: cast it before" in text
    assert "--config.model.remat=full  8.30 GiB at the peak, step x 1.21, fits" in text
    assert "compiled in 14.7 s" in text and "jax 0.10.2" in text


def test_upper_bounds_are_marked() -> None:
    report = lab_report.report()
    bounded = dataclasses.replace(report.collectives[0], conditional=True, bounded=True)
    text = shown(dataclasses.replace(report, collectives=(bounded, *report.collectives[1:])))
    assert (
        "≤ 2,304" in text and "≤: in a branch of a conditional, counted as if it always ran" in text
    )
    assert "≤" not in shown(report)


def test_stages_that_differ_are_told_of() -> None:
    uneven, even = (
        shown(
            lab_report.report(stage_flops=(300 * 10**12, n * 10**12)), facts=[("bubble", "10.9 %")]
        )
        for n in (370, 300)
    )
    assert "335.0 TFLOP in all, the mean of stages with 300.0 TFLOP to 370.0 TFLOP" in " ".join(
        uneven.split()
    )
    assert "stages" not in even and "bubble 10.9 %" in even


def test_colours_change_no_letter() -> None:
    coloured = shown(lab_report.report(), colours=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(lab_report.report())


def test_eighty_columns_keep_what_matters() -> None:
    text = shown(lab_report.report(), 80, findings=[FINDING])
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        "fits, 70.84 GiB free",
        "tensor, NVLink",
        "reduce-scatter bf16",
        "189.00",
        "optimizer",
        "cast it before",
    ):
        assert word in text, word
    unbroken = re.sub(r"\s", "", text)
    for source in ("(mesh_lm/model/decoder.py:88)", "(mesh_lm/model/layers.py:107)"):
        assert (
            source in unbroken
            and "…" not in text.partition("live at the peak")[2].partition("\nover")[0]
        ), "source lines are not cut"


def test_what_does_not_fit_on_the_screen_is_counted() -> None:
    report = lab_report.report()
    many = tuple(
        dataclasses.replace(c, axes=(*c.axes, axis))
        for c in report.collectives
        for axis in "abcdef"
    )
    buffers = tuple(
        dataclasses.replace(b, shape=f"f32[{i}]") for i in range(30) for b in report.memory.buffers
    )
    crowded = dataclasses.replace(
        report, collectives=many, memory=dataclasses.replace(report.memory, buffers=buffers)
    )
    lines = shown(crowded, findings=[FINDING] * 30).splitlines()
    assert len(lines) <= LINES
    some = {line.split()[0]: i for i, line in enumerate(lines) if line.strip()}
    more = [
        (i, int(re.findall(r"\d+", line)[0])) for i, line in enumerate(lines) if " more" in line
    ]
    for (end, hidden), title, all_of_them in zip(
        more, ("live", "over", "findings"), (len(buffers), 6 * 6, 30), strict=True
    ):
        begin = max(i for word, i in some.items() if word == title)
        assert end - begin - 1 + hidden == all_of_them, title


def test_too_much_memory_is_said_and_drawn() -> None:
    report = lab_report.report(hbm=6 * GIB)
    text = shown(
        report, findings=[FINDING], fixes=[Fix("remat", "remat=full", report, 3 * GIB, None)]
    )
    assert "does not fit, 2.30 GiB too much" in text and text.index("what would help") < text.index(
        "findings"
    )
    peak = next(line for line in text.splitlines() if line.startswith("peak"))
    assert "138 %" in peak and peak.rstrip().endswith("█")  # past the line of HBM


def test_unknown_devices_have_no_limit() -> None:
    text = shown(lab_report.report(hbm=0, target="", timeline=None))
    assert (
        "1,024 x device" in text
        and "not known" in text
        and "of the peak" in text
        and "step " not in text
    )


def test_utilisation_is_of_the_predicted_step() -> None:
    report = lab_report.report()
    assert report.timeline and report.mfu == pytest.approx(
        250e12 / (report.timeline.step / 1e6 * 989.4e12)
    )
    assert report.exposed_share == pytest.approx(report.timeline.exposed / report.timeline.step)
    unknown = lab_report.report(model_flops=0.0)
    assert unknown.mfu is None and "matmuls at 6 % of the peak" in " ".join(
        shown(unknown).split()
    ), "335 TFLOP in 6 s"
    assert (
        lab_report.report(timeline=None).exposed_share is None
        and lab_report.report(peak_flops=0.0).utilisation is None
    )


def test_small_programs_have_small_units() -> None:
    report = lab_report.report()
    buffers = tuple(dataclasses.replace(b, bytes=b.bytes // 2**14) for b in report.memory.buffers)
    memory = dataclasses.replace(report.memory, buffers=buffers, peak=sum(b.bytes for b in buffers))
    sent = tuple(
        dataclasses.replace(c, wire=c.wire / 2**20, payload=c.payload >> 10)
        for c in report.collectives
    )
    text = shown(dataclasses.replace(report, memory=memory, collectives=sent))
    assert (
        re.search(r"memory at the peak +MiB", text)
        and re.search(r"live at the peak +MiB", text)
        and re.search(r"[KM]iB sent", text)
    )
    assert re.search(r"^moments +0\.2 ", text, re.MULTILINE) and "0.00" not in text


def test_names_are_no_markup() -> None:
    report = lab_report.report(name="[bold]a[/bold]")
    nasty = dataclasses.replace(report.collectives[0], where=Location("[red]x[/red]", "forward"))
    text = shown(
        dataclasses.replace(report, collectives=(nasty,)),
        findings=[dataclasses.replace(FINDING, text="[link]y")],
    )
    for word in ("[bold]a[/bold]", "red]", "[link]y"):
        assert word in text


def test_a_program_without_collectives() -> None:
    assert "none" in shown(lab_report.report(collectives=(), flops={}))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (size(4.2 * GIB), "4.20 GiB"), (size(0.2 * GIB), "0.20 GiB"),
        (size(56.1 * MIB), "56.1 MiB"), (size(3000), "3 KiB"),
        (size(12), "12 B"), (size(0), "0 B"), (size(-2 * GIB), "-2.00 GiB"),
        (duration(18.4e6), "18.4 s"), (duration(56_100), "56.1 ms"), (duration(3.2), "3.2 µs"),
        (duration(5e9), "5,000 s"),
        (flop(337.4e12), "337.4 TFLOP"), (flop(2e9), "2.0 GFLOP"), (flop(5e6), "5.0 MFLOP"),
        (percent(13, 100), "13 %"), (percent(0.1, 100), "<1 %"), (percent(0, 100), "0 %"),
        (percent(1, 0), "0 %"),
    ],
)  # fmt: skip
def test_numbers_that_a_person_reads(said: str, expected: str) -> None:
    assert said == expected
