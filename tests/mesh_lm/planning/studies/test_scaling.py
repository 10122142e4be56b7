"""Figures 3 to 5 and 8: scaling, with a compiler of our own."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import lab_report
import pytest

from mesh_lm.commands import study
from mesh_lm.config import TrainConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.planning.studies import figures, scaling
from mesh_lm.planning.studies.published import STRONG, WEAK
from mesh_lm.planning.studies.scaling import (
    Kept,
    Point,
    Result,
    ScalingRow,
    Search,
    beside_published,
    megatron_flops,
    published_points,
    scaled,
    shares_of,
    strong_points,
    weak_points,
)
from sharding_rules.lab import LabError, Report

GIB = 2**30
RATES = {"fast": 0.77, "slow": 0.69}


class Compiler:
    """Reports steps that are the longer the fewer GPUs there are."""

    def __init__(self, interrupted_at: int = -1) -> None:
        self.gpus: list[int] = []
        self._interrupted_at = interrupted_at

    def __call__(self, config: TrainConfig, n_devices: int) -> Report:
        self.gpus.append(n_devices)
        if len(self.gpus) == self._interrupted_at:
            raise KeyboardInterrupt
        report = lab_report.report()
        assert report.timeline
        step = 64e6 / n_devices
        timeline = dataclasses.replace(
            report.timeline, step=step, exposed=0.1 * step, kinds={"matmul": 0.6 * step}
        )
        slow = dataclasses.replace(timeline, step=1.2 * step)
        memory = dataclasses.replace(report.memory, peak=60 * GIB)
        return dataclasses.replace(report, timeline=timeline, sustained=slow, memory=memory)


def search(compile_one: Any, compiles: int = 1) -> Search:
    return Search("h100", compiles, "", compile_one)


def test_the_published_points_are_those_of_the_configs_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    page = importlib.import_module("plan_page")
    table = importlib.import_module("plan_table")
    assert {name: row.tflops for name, row in WEAK.items()} == page.TFLOPS
    assert {name: row.gpus for name, row in WEAK.items()} == {
        name: table.PUBLISHED[name] for name in WEAK
    }
    for name in ("plan_page", "plan_table"):
        sys.modules.pop(name, None)


def test_strong_points_have_one_batch_and_what_is_published() -> None:
    config = load("megatron_177b")
    points = strong_points("megatron_177b", config, [96, 2304, 4608, 6144])
    assert {point.config.train.global_batch for point in points} == {1152}
    assert [point.published_tflops for point in points] == [462.6, 435.2, 414.2, None]
    assert list(STRONG["megatron_177b"]) == [96, 144, 288, 576, 1152, 2304, 3072, 4608]
    other = strong_points("megatron_1_7b", load("megatron_1_7b"), [48, 96])
    assert [point.published_tflops for point in other] == [408.8, None]


def test_the_batch_of_weak_points_grows() -> None:
    points = weak_points("megatron_1_7b", load("megatron_1_7b"), 48, [24, 48, 96, 100])
    assert [point.config.train.global_batch for point in points[:3]] == [96, 192, 384]
    assert [point.published_tflops for point in points] == [None, 408.8, None, None]
    odd = weak_points("x", load("megatron_1_7b"), 50, [8])
    assert odd[0].status == "192 sequences on 50 GPUs are no whole number on 8"


def test_models_that_grow() -> None:
    points = published_points()
    assert [point.gpus for point in points] == [48, 96, 192, 384, 768, 1536, 2304, 3072, 6144]
    assert all(point.published_tflops for point in points)


def test_what_was_measured_on_h100s_stands_beside_no_other_gpu() -> None:
    config = load("megatron_177b")
    points = [
        *published_points("h200"),
        *strong_points("megatron_177b", config, [96, 2304], "h200"),
        *weak_points("megatron_1_7b", load("megatron_1_7b"), 48, [48], "h200"),
    ]
    assert len(points) == 12 and not any(point.published_tflops for point in points)
    words = ["scaling", "megatron_177b", "--gpus=96,2304", "--target=h200"]
    options = study.parse(words)
    assert isinstance(options, study.Scaling)
    assert not any(point.published_tflops for point in study._points(options))
    arguments = ([row(0.0)._replace(config="megatron_177b")], [], "one")
    for target, expected in (("h200", True), ("h100", False)):
        made = figures.of_scaling(*arguments, target, "", grows=False, n_points=1)
        said = any("of H100s, and is not compared with" in text for text in made.sentences)
        assert said == expected


def test_a_row_is_arithmetic_on_its_report() -> None:
    config = load("llama3_8b")
    (result,) = scaled(strong_points("llama3_8b", config, [64]), search(Compiler()), Kept())
    row = result.row
    assert (row.step_fast_s, row.step_slow_s) == pytest.approx((1.0, 1.2))
    tokens = config.train.global_batch * config.model.seq_len
    assert (row.tokens_fast, row.tokens_slow) == pytest.approx((tokens, tokens / 1.2))
    assert row.tflops_fast == pytest.approx(megatron_flops(config) / 64 / 1e12)
    model_flops = config.model.flops_per_token() * tokens / 64
    assert row.mfu_fast == pytest.approx(model_flops / 989.4e12)
    assert row.peak_gib == 60 and row.waits_fast_s == pytest.approx(0.1)
    assert row.published_tflops is None and row.status == ""


def test_megatrons_flops_are_its_equation() -> None:
    config = load("megatron_1_7b")
    model: Any = config.model
    B, s, l, h, V = (
        config.train.global_batch,
        model.seq_len,
        model.n_layers,
        model.d_model,
        model.vocab_size,
    )
    expected = 72 * B * s * l * h**2 * (1 + s / (6 * h) + V / (12 * l * h))
    assert megatron_flops(config) == pytest.approx(expected)


def test_points_that_no_layout_serves_are_marked() -> None:
    config = load("llama3_8b")
    batch = config.train.global_batch
    points = strong_points("llama3_8b", config, [12, 64])
    points.append(Point("llama3_8b", config, 8, status="not a point"))
    first, second, third = scaled(points, search(Compiler()), Kept())
    assert "12 devices do not fill whole nodes of 8 h100" in first.row.status
    assert first.row.step_fast_s is None and first.row.batch == batch
    assert second.row.status == "" and third.row.status == "not a point"


def test_a_program_that_does_not_fit_is_marked() -> None:
    def compile_one(config: TrainConfig, n_devices: int) -> Report:
        report = Compiler()(config, n_devices)
        return dataclasses.replace(
            report, memory=dataclasses.replace(report.memory, peak=100 * GIB)
        )

    (result,) = scaled(
        strong_points("llama3_8b", load("llama3_8b"), [64]), search(compile_one), Kept()
    )
    assert result.row.status.startswith("does not fit: 100.0 GiB of the smallest of ")
    assert result.row.step_fast_s is None


def test_a_compiler_that_fails_marks_the_point() -> None:
    def refuses(config: TrainConfig, n_devices: int) -> Report:
        raise LabError("XLA said no\nand more")

    points = strong_points("llama3_8b", load("llama3_8b"), [64])
    kept = Kept()
    (result,) = scaled(points, search(refuses), kept)
    assert result.row.status == "XLA said no"
    # The compiler may have lacked memory: the next time may be another.
    (again,) = scaled(points, search(Compiler()), kept)
    assert again.row.status == "" and again.row.step_fast_s


def test_a_kept_point_is_that_of_the_same_table_of_rules_and_of_all_that_a_step_reads() -> None:
    config = load("llama3_8b")
    (point,) = strong_points("llama3_8b", config, [64])
    changed = [
        dataclasses.replace(config, rules=config.rules.replace(params={"embed": None})),
        dataclasses.replace(config, seed=1),
        dataclasses.replace(config, health=dataclasses.replace(config.health, outlier=9.0)),
        dataclasses.replace(config, data=dataclasses.replace(config.data, documents="separate")),
        dataclasses.replace(config, diloco=dataclasses.replace(config.diloco, outer_steps=7)),
    ]
    same_name = dataclasses.replace(changed[0].rules, name=config.rules.name)
    changed.append(dataclasses.replace(config, rules=same_name))
    keys = [scaling.key_of(point._replace(config=one), search(None)) for one in changed]
    assert len({scaling.key_of(point, search(None)), *keys}) == 1 + len(keys)


def test_an_interrupted_study_continues(tmp_path: Path) -> None:
    """With the points that are finished, which are not compiled again."""
    file = str(tmp_path / "points.json")
    points = strong_points("llama3_8b", load("llama3_8b"), [16, 32, 64])
    said: list[str] = []
    first = Compiler(interrupted_at=4)
    finished = list(scaled(points, search(first), Kept(file), said.append))
    assert [result.row.gpus for result in finished] == [16, 32] or len(finished) == 1
    assert any("the same command continues" in line for line in said)
    assert any("left, about" in line for line in said)

    second = Compiler()
    said.clear()
    again = list(scaled(points, search(second), Kept(file), said.append))
    assert [result.row.gpus for result in again] == [16, 32, 64]
    assert set(second.gpus) == {16, 32, 64} - {result.row.gpus for result in finished}
    assert again[: len(finished)] == finished
    assert sum("kept from before" in line for line in said) == len(finished)


def test_a_kept_point_is_that_of_the_same_search(tmp_path: Path) -> None:
    file = str(tmp_path / "points.json")
    points = strong_points("llama3_8b", load("llama3_8b"), [64])
    list(scaled(points, search(Compiler()), Kept(file)))
    key = scaling.key_of(points[0], search(None))
    assert Kept(file).find(key) is not None
    assert scaling.key_of(points[0], search(None, compiles=2)) != key
    other = dataclasses.replace(
        points[0].config, train=dataclasses.replace(points[0].config.train, global_batch=64)
    )
    assert scaling.key_of(points[0]._replace(config=other), search(None)) != key
    Path(file).write_text("torn", encoding="utf-8")
    assert Kept(file).find(key) is None


def test_the_compilers_absence_and_a_wrong_keep_end_the_study() -> None:
    points = strong_points("llama3_8b", load("llama3_8b"), [64])
    with pytest.raises(ConfigError, match="the fields that a search can keep"):
        list(scaled(points, Search("h100", 1, "mesh.tenser=8", Compiler()), Kept()))


def test_communication_by_kind_and_axes_adds_up() -> None:
    report = lab_report.report()
    shares = shares_of("one", report)
    assert sum(row.sent_gib for row in shares) == pytest.approx(report.wire_bytes() / GIB)
    waits = sum(one.exposed for one in report.collectives) / 1e6
    assert sum(row.waits_s for row in shares) == pytest.approx(waits)
    assert report.timeline
    assert sum(row.waits_share for row in shares) == pytest.approx(
        1e6 * waits / report.timeline.step
    )
    assert len({(row.kind, row.axes, row.link) for row in shares}) == len(shares)
    over_tensor = [row for row in shares if row.axes == "tensor"]
    assert over_tensor and all(row.link == "NVLink" for row in over_tensor)


def row(published: float, fast: float = 400.0, slow: float = 350.0) -> ScalingRow:
    """A step of 1 s at the fast end, a tenth of which waits."""
    return ScalingRow(
        "m", 1, 64, 8, "", 1.0, fast / slow, 1.0, 1.0, fast, slow, 0.5, 0.4, published, 0.1, 0.6, 0.7
    )  # fmt: skip


def test_published_points_beside_the_band() -> None:
    inside, slower, overlap, faster, impossible = (
        list(beside_published([row(n)], RATES)) for n in (380.0, 300.0, 430.0, 460.0, 500.0)
    )
    assert inside[0].startswith("1 of 1 published points are inside the band") and len(inside) == 1
    assert (
        "17% slower than the slow end; large matmuls at 0.54 of the peak, in place of 0.69"
        in slower[1]
    )
    assert (
        "7% faster than the fast end; waits for the network of 3% of the step, in place of 10%"
        in overlap[1]
    )
    assert "13% faster than the fast end; large matmuls at 0.98 of the peak" in faster[1]
    assert "20% faster than the fast end; no single assumption explains it" in impossible[1]
    assert list(beside_published([row(0.0)], RATES)) == []


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "points.json"))
    result = Result(row(380.0), shares_of("one", lab_report.report()))
    kept.add("key", result)
    assert Kept(str(tmp_path / "points.json")).find("key") == result


def test_the_study_says_what_is_missing() -> None:
    arguments = ([row(380.0)], [], "one", "h100", "mesh-lm study scaling one")
    interrupted = figures.of_scaling(*arguments, grows=False, n_points=3)
    assert any("2 of 3 points are missing" in sentence for sentence in interrupted.sentences)
    finished = figures.of_scaling(*arguments, grows=True, n_points=1)
    assert not any("missing" in sentence for sentence in finished.sentences)
    assert list(finished.tables) == ["weak_scaling", "weak_communication"]
