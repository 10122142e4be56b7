"""Figures 2 and 6: strategies side by side, against arithmetic and without a compiler."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lab_report
import pytest

from mesh_lm.commands import command_line
from mesh_lm.config import TrainConfig
from mesh_lm.config.layout import LAYOUT_OF_MODEL
from mesh_lm.errors import ConfigError
from mesh_lm.planning.best import hardware_of
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.terms import total
from mesh_lm.planning.paper.constants import HELD_OUT
from mesh_lm.planning.paper.layouts import Layouts, layout_of
from mesh_lm.planning.paper.price import price
from mesh_lm.planning.paper.sizes import ModelSizes
from mesh_lm.planning.studies import figures
from mesh_lm.planning.studies.models import decoder
from mesh_lm.planning.studies.strategies import (
    CONTEXT,
    NAMES,
    TIE,
    ZERO_2,
    StrategyRow,
    best_of,
    compiled,
    points_of,
    points_that_matter,
    side_by_side,
    state_bytes,
    winner,
    with_options,
)
from mesh_lm.training.check import check
from sharding_rules.lab import LabError, Report

GIB = 2**30
RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
RUN = {"seq_len": 4096, "batch": 2048}


@pytest.fixture(scope="module")
def rows() -> list[StrategyRow]:
    return side_by_side([1e9, 1e10, 1e11], [8, 64, 4096], "h100", **RUN)


def at(rows: list[StrategyRow], size: str, gpus: int) -> dict[str, StrategyRow]:
    return {row.strategy: row for row in points_of(rows)[size, gpus]}


def test_every_strategy_has_a_row_at_every_point(rows: list[StrategyRow]) -> None:
    assert len(rows) == 3 * 3 * len(NAMES)
    assert all(
        [row.strategy for row in of_point] == list(NAMES) for of_point in points_of(rows).values()
    )


def test_the_state_is_arithmetic(rows: list[StrategyRow]) -> None:
    """16 bytes a parameter, and what each strategy shards of them."""
    config = decoder(1e10, **RUN)
    sizes = ModelSizes.of(config)
    assert sizes is not None
    n = sizes.layers * (sizes.matrices + sizes.vectors) + sizes.tables + sizes.positions
    point = at(rows, "10b", 64)
    bytes_of = {
        "DDP": 16 * n, "ZeRO-1": 8 * n + 8 * n / 64, ZERO_2: 4 * n + 12 * n / 64,
        "distributed": 2 * n + 4 * n + 12 * n / 64, "ZeRO-3": 16 * n / 64, "FSDP": 16 * n / 64,
        CONTEXT: 16 * n / 64,
    }  # fmt: skip
    for strategy, n_bytes in bytes_of.items():
        assert point[strategy].state_gib == pytest.approx(n_bytes / GIB, rel=1e-12), strategy


def test_the_state_of_stages_and_of_tensor_parallelism() -> None:
    sizes = ModelSizes.of(decoder(1e10, **RUN))
    assert sizes is not None
    one = dict.fromkeys(Layouts.names(), 1.0) | {"replicas": 0.0}
    tables = sizes.tables + sizes.positions
    in_layers = sizes.layers * (sizes.matrices + sizes.vectors)
    assert state_bytes(sizes, one) == 16 * (in_layers + tables)
    assert state_bytes(sizes, one | {"pipeline": 4.0}) == 16 * (in_layers / 4 + tables)
    tensor = sizes.layers * (sizes.matrices / 8 + sizes.vectors) + sizes.tables / 8
    assert state_bytes(sizes, one | {"tensor": 8.0}) == 16 * (tensor + sizes.positions)


def test_a_row_is_that_of_its_options(rows: list[StrategyRow]) -> None:
    """Its layout can run, and has the price and the bytes of the row."""
    n_checked = 0
    for row in rows:
        if not row.fits:
            continue
        config = check(
            with_options(
                decoder({"1b": 1e9, "10b": 1e10, "100b": 1e11}[row.size], **RUN), row.options
            ),
            row.gpus,
        )
        layout = layout_of(config, row.gpus)
        sizes = ModelSizes.of(config)
        assert layout and sizes
        paper = price(sizes, Layouts.of([layout]), hardware_of("h100"))
        assert paper.seconds[0] == pytest.approx(row.step_fast_s)
        assert paper.peak[0] / GIB == pytest.approx(row.peak_gib)
        assert row.inside_gib is not None and row.between_gib is not None
        assert row.inside_gib + row.between_gib == pytest.approx(total(expected_of(config)) / GIB)
        assert row.step_slow_s and row.step_fast_s and row.step_slow_s >= row.step_fast_s
        n_checked += 1
    assert n_checked > 40


def test_the_options_of_a_row_make_any_config_run_in_its_layout(rows: list[StrategyRow]) -> None:
    """Whatever mesh, rules, policies and batch the config has."""
    own = [
        "llama3_70b", "--mesh.pipeline=4", "--mesh.fsdp=2", "--mesh.extra=tensor_y=2",
        "--model.remat=none", "--model.kept_layers=3", "--pipeline.pair_layers",
        "--pipeline.layers=40,40", "--train.global_batch=24",
    ]  # fmt: skip
    study = {"1b": 1e9, "10b": 1e10, "100b": 1e11}
    n_checked = 0
    for row in rows:
        if not row.options:
            continue
        changed = command_line.parse([*own, *row.options.split()])
        expected = with_options(decoder(study[row.size], **RUN), row.options)
        assert changed.mesh == expected.mesh and changed.rules == expected.rules
        assert changed.pipeline == expected.pipeline and changed.launch == expected.launch
        assert changed.train.microbatches == expected.train.microbatches
        assert changed.train.global_batch == RUN["batch"]
        for name in LAYOUT_OF_MODEL:
            assert getattr(changed.model, name) == getattr(expected.model, name), name
        n_checked += 1
    assert n_checked > 60


def test_bytes_go_by_the_network_of_their_groups(rows: list[StrategyRow]) -> None:
    node = at(rows, "10b", 8)
    assert all(row.between_gib in (0, None) for row in node.values())
    several = at(rows, "10b", 64)
    assert several["ZeRO-3"].inside_gib == 0
    assert (several["TP"].inside_gib or 0) > (several["TP"].between_gib or 0) > 0


def test_points_without_a_layout_are_marked(rows: list[StrategyRow]) -> None:
    many = at(rows, "10b", 4096)
    assert many["ZeRO-3"].status == "more GPUs than the 2,048 sequences of a step"
    assert many["ZeRO-3"].step_fast_s is None
    large = at(rows, "100b", 8)
    assert large["DDP"].status.startswith("does not fit: ") and not large["DDP"].fits
    assert winner(list(large.values())) is None
    other = side_by_side([1e9], [24], "h100", **RUN)
    assert other[0].status == "a step's 2,048 sequences do not divide by 24"


def test_the_winner_is_the_simplest_within_the_formulas_error() -> None:
    def row(strategy: str, seconds: float, fits: bool = True) -> StrategyRow:
        return StrategyRow("1b", 1, 8, strategy, "", fits, step_fast_s=seconds)

    close = [row("DDP", 1.2), row("ZeRO-1", 1.09), row("3D", 1.0)]
    found = winner(close)
    assert found is not None and found.strategy == "ZeRO-1" and HELD_OUT.step_mean == TIE
    assert winner([row("DDP", 1.0, fits=False)]) is None
    # What was compiled counts, not the paper.
    slow = close[1]._replace(compiled_fast_s=1.5, compiled_fits=True)
    found = winner([close[0], slow, close[2]])
    assert found is not None and found.strategy == "3D"
    too_large = close[2]._replace(compiled_fast_s=1.0, compiled_fits=False)
    assert too_large.seconds == math.inf


def test_the_points_that_matter_are_compiled(rows: list[StrategyRow]) -> None:
    compiled_configs: list[tuple[TrainConfig, int]] = []
    lines: list[str] = []

    def compile_one(config: TrainConfig, n_devices: int) -> Report:
        compiled_configs.append((config, n_devices))
        if len(compiled_configs) == 2:
            raise LabError("XLA said no")
        return lab_report.report()

    changed = compiled(rows, 4, "h100", compile_one, **RUN, say=lines.append)
    assert len(compiled_configs) == 4 and len(changed) == len(rows)
    done = [row for row in changed if row.compiled_fits is not None]
    assert len(done) == 3 and any("XLA said no" in line for line in lines)
    matter = points_that_matter(rows)
    first, second = matter[:2]
    assert (first.size, first.gpus) == (second.size, second.gpus)
    gaps = [
        abs(math.log(a.seconds / b.seconds)) for a, b in zip(matter[::2], matter[1::2], strict=True)
    ]
    assert gaps == sorted(gaps)


def test_without_a_compiler_it_says_so(rows: list[StrategyRow]) -> None:
    def missing(config: Any, n_devices: int) -> Report:
        raise LabError("no compiler")

    with pytest.raises(LabError, match="no compiler"):
        compiled(rows, 2, "h100", missing, **RUN)


def test_the_best_of_each_family(rows: list[StrategyRow]) -> None:
    of_point = points_of(rows)["10b", 64]
    pure = best_of(of_point, pure=True)
    hybrid = best_of(of_point, pure=False)
    assert pure and pure.strategy == "ZeRO-3"
    assert hybrid and hybrid.strategy == "TP + ZeRO"
    assert best_of(points_of(rows)["10b", 4096], pure=True) is None


def test_the_points_of_the_details(rows: list[StrategyRow]) -> None:
    assert {row.size for row in figures.point_of(rows, "10B@64")} == {"10b"}
    telling = figures.point_of(rows, "")
    assert any(row.fits for row in telling)
    with pytest.raises(
        ConfigError, match="--detail=10b@65: the study has no such point; write one as 1b@8"
    ):
        figures.point_of(rows, "10b@65")


def test_the_family_has_the_parameters_that_it_says() -> None:
    for n_params in (1e9, 3e9, 7e9, 1e10, 3e10, 7e10, 1e11, 3e11, 1e12):
        model: Any = decoder(n_params).model
        assert abs(model.n_params() / n_params - 1) < 0.1
        assert model.n_heads % 8 == 0 and model.n_layers % 8 == 0
        assert 60 < model.d_model / model.n_layers < 200


def test_the_error_is_that_of_the_results() -> None:
    newest = max(RESULTS.glob("fit_formulas_2*.json"))
    rows = json.loads(newest.read_text(encoding="utf-8"))["tables"]["Errors"]["rows"]
    for name, value in HELD_OUT._asdict().items():
        assert value == round(max(row[name] for row in rows), 2), name


def test_the_mfu_of_a_compiled_program_is_its_own() -> None:
    row = StrategyRow(
        "1b", 1, 8, "DDP", "", True, step_fast_s=1.0, step_slow_s=1.2, mfu_fast=0.6, mfu_slow=0.5
    )
    assert row.mfu == (0.5, 0.6)
    compiled_row = row._replace(compiled_fast_s=2.0, compiled_slow_s=2.4, compiled_fits=True)
    assert compiled_row.mfu == pytest.approx((0.25, 0.3))
    assert StrategyRow("1b", 1, 8, "DDP", "none", False).mfu is None
