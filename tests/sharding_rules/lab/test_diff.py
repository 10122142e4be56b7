"""What changed between two reports, and golden ledgers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import lab_report
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_report import GIB, MIB, collective

from sharding_rules.lab.diff import diff, explain, ledger_text
from sharding_rules.lab.report import LabError, Location, Report

A = lab_report.report()
EXTRA = collective(
    "all-gather", ("tensor",), "bf16[12288,6144]", 144 * MIB, "layers/mlp", "recompute", loops=(96,)
)


def with_(*collectives: Any, without: int | None = None, **changes: Any) -> Report:
    kept = tuple(c for i, c in enumerate(A.collectives) if i != without)
    return lab_report.report(collectives=(*kept, *collectives), **changes)


def test_nothing_changed() -> None:
    same = diff(A, A)
    assert not same and str(same) == "gpt_175b and gpt_175b: no difference"
    assert explain(ledger_text(A), ledger_text(A)) == ""


def test_a_collective_that_appeared() -> None:
    said = str(diff(A, with_(EXTRA, name="new")))
    assert said.splitlines()[0] == "gpt_175b -> new"
    assert (
        "  + all-gather of bf16[12288,6144] over tensor, 96 x, in recompute of layers/mlp: + 11.81 "
        "GiB"
    ) in said.splitlines()
    assert "  tensor  316.34 GiB -> 328.16 GiB  + 11.81 GiB" in said.splitlines()


def test_a_collective_that_vanished_and_one_that_runs_more_often() -> None:
    gone = with_(without=len(A.collectives) - 1)
    assert str(diff(A, gone).collectives[0]).startswith(
        "- all-gather of f32[2,2048,50304] over tensor, 4 x, in forward of loss: - 1.34 GiB"
    )
    often = with_(
        dataclasses.replace(A.collectives[-1], loops=(8,)), without=len(A.collectives) - 1
    )
    assert str(diff(A, often).collectives[0]) == (
        "~ all-gather of f32[2,2048,50304] over tensor in forward of loss: 4 x -> 8 x, + 1.34 GiB"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"kind": "all-reduce", "wire": 2 * A.collectives[-1].wire},
            "all-gather -> all-reduce, + 1.34 GiB",
        ),
        (
            {"dtype": "bf16", "shapes": ("bf16[2,2048,50304]",)},
            "f32[2,2048,50304] -> bf16[2,2048,50304], as many bytes",
        ),
        ({"axes": ("fsdp",)}, "tensor -> fsdp, as many bytes"),
    ],
)
def test_a_collective_that_became_another(change: dict[str, Any], said: str) -> None:
    other = with_(dataclasses.replace(A.collectives[-1], **change), without=len(A.collectives) - 1)
    (one,) = diff(A, other).collectives
    assert (
        str(one)
        == f"~ all-gather of f32[2,2048,50304] over tensor, 4 x, in forward of loss: {said}"
    )
    assert str(one) in explain(ledger_text(A), ledger_text(other)).splitlines()


def test_what_runs_more_often_is_not_the_same_under_another_name() -> None:
    other = with_(
        dataclasses.replace(A.collectives[-1], kind="all-reduce", loops=(8,)),
        without=len(A.collectives) - 1,
    )
    assert sorted(str(one)[0] for one in diff(A, other).collectives) == ["+", "-"]


def test_memory_flops_step_and_mesh() -> None:
    assert A.timeline
    less = dataclasses.replace(
        A.memory, buffers=A.memory.buffers[1:], peak=A.memory.peak - A.memory.buffers[0].bytes
    )
    b = with_(
        name="b", mesh={"data": 4, "fsdp": 32, "tensor": 8}, memory=less,
        flops={**A.flops, "recompute": 0},
        timeline=dataclasses.replace(A.timeline, step=2 * A.timeline.step),
    )  # fmt: skip
    difference = diff(A, b)
    assert difference.memory["params"] == (int(1.69 * GIB), 0) and difference.wire == {}
    said = str(difference)
    for line in (
        "mesh: data 8 x fsdp 16 x tensor 8 -> data 4 x fsdp 32 x tensor 8",
        "  params  1.69 GiB ->      0 B  - 1.69 GiB",
        "  peak    8.30 GiB -> 6.61 GiB  - 1.69 GiB",
        "  recompute  80.0 TFLOP -> 0.0 MFLOP  - 80.0 TFLOP",
        "  step  6.01 s -> 12 s  + 6.01 s",
    ):
        assert line in said.splitlines(), said
    assert diff(A, with_(timeline=None)).step is None


def test_a_ledger_holds_meaning_only() -> None:
    text = ledger_text(A)
    mesh, *lines = text.splitlines()
    assert mesh == "mesh data 8 x fsdp 16 x tensor 8" and lines == sorted(
        lines, key=lambda line: (line.split()[2], line.split(" in ")[1])
    )
    assert (
        "all-gather over tensor of bf16[2,2048,12288] in recompute of layers/mlp: 384 x, "
        "33822867456 bytes"
    ) in lines
    assert "layers.py" not in text and "f32[]" not in text


@given(seed=st.integers(0, 1000), index=st.integers(0, len(A.collectives) - 1))
def test_golden_ledgers_ignore_names_and_order_and_nothing_else(seed: int, index: int) -> None:
    renamed = [
        dataclasses.replace(
            c, name=f"other.{i}", where=dataclasses.replace(c.where, source="x.py:1", op="y")
        )
        for i, c in enumerate(A.collectives)
    ]
    random.Random(seed).shuffle(renamed)
    assert ledger_text(dataclasses.replace(A, collectives=tuple(renamed))) == ledger_text(A)
    said = explain(ledger_text(A), ledger_text(with_(without=index)))
    scalar = A.collectives[index].payload < 1024
    assert (
        said == ""
        if scalar
        else said.startswith(
            f"- {A.collectives[index].kind} of {A.collectives[index].shapes[0]} over"
        )
    )


def test_an_unrolled_loop_means_the_same() -> None:
    last = A.collectives[-1]
    once = dataclasses.replace(last, loops=())
    assert ledger_text(
        with_(once, once, once, once, without=len(A.collectives) - 1)
    ) == ledger_text(A)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' does not begin a ledger; its first line is: mesh AXIS N x AXIS N"),
        ("mesh data 2\nall-gather of", "'all-gather of' is no line of a ledger"),
    ],
)
def test_another_text(text: str, message: str) -> None:
    with pytest.raises(LabError) as error:
        explain(text, ledger_text(A))
    assert str(error.value) == message


def test_a_place_that_xla_does_not_say() -> None:
    unknown = with_(dataclasses.replace(EXTRA, where=Location(), axes=()))
    text = ledger_text(unknown)
    assert "all-gather over none of bf16[12288,6144] in ?: 96 x," in text
    assert explain(ledger_text(A), text).startswith(
        "+ all-gather of bf16[12288,6144] over none, 96 x, in ?: +"
    )
