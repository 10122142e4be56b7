"""benchmarks/bars.py: what counts as met, Megatron's formula, and which earlier results are
kept."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mesh_lm.config import load

ROOT = Path(__file__).parents[2]
ROW = {
    "config": "megatron_16b", "GPUs": 192, "pipelined": False, "step_s": 0.7, "peak_gib": 40.0,
    "tflops": 490.0, "mfu": 0.45,
    "exposed_share": 0.1, "model_ratio": 1.3, "waits_for": "data 10.0%",
    "longest": "10.0% all-reduce data",
}  # fmt: skip


@pytest.fixture(scope="module")
def bars() -> Iterator[ModuleType]:
    """The command, whose file imports its neighbours as a script does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("bars")


def bar(bars: ModuleType, name: str) -> Any:
    return next(each for each in bars.BARS if each.name == name)


def test_every_config_of_the_table_has_a_bar(bars: ModuleType) -> None:
    assert {each.config for each in bars.BARS} == set(bars.DEVICES)
    assert len({each.name for each in bars.BARS}) == len(bars.BARS)


def test_a_bar_is_met_or_its_figure_is_named(bars: ModuleType) -> None:
    one = bar(bars, "megatron_16b")
    assert bars.unmet(one, ROW) == [] and bars.compared(one, ROW, None)["met"]
    assert bars.unmet(one, ROW | {"tflops": 489.0}) == ["TFLOP/s >= 489.1: 489"]
    assert bars.unmet(one, ROW | {"model_ratio": 1.4}) == ["ratio <= 1.35: 1.4"]
    assert bars.unmet(one, ROW | {"model_ratio": 1.4, "pipelined": True}) == []
    assert bars.unmet(one, ROW | {"exposed_share": 0.16}) == ["exposed <= 0.15: 0.16"]
    largest = bar(bars, "gpt_175b")
    assert bars.unmet(largest, ROW | {"step_s": 6.8, "peak_gib": 51.0}) == [
        "step <= 6.7: 6.8",
        "GiB <= 50: 51",
    ]
    assert bars.unmet(largest, ROW | {"step_s": 6.5, "all_on_step_s": 6.3}) == [
        "all on <= 6.2: 6.3"
    ], "only where it was compiled"
    assert bars.unmet(bar(bars, "megatron_70b"), ROW | {"tflops": 378.0}) == [], (
        "nine tenths of 419.7"
    )


def test_the_base_is_beside(bars: ModuleType) -> None:
    line = bars.compared(bar(bars, "megatron_16b"), ROW, ROW | {"step_s": 1.05, "model_ratio": 2.0})
    assert (line["step, s"], line["base step"], line["base ratio"], line["published"]) == (
        0.7,
        1.05,
        2.0,
        489.1,
    )
    assert line["waits for"] == "data 10.0%", "of more than the bar each collective"
    assert (
        bars.compared(bar(bars, "megatron_16b"), ROW | {"exposed_share": 0.2}, None)["waits for"]
        == "10.0% all-reduce data"
    )


@pytest.mark.parametrize("name", ["megatron_1_7b", "megatron_462b"])
def test_the_formula_is_megatrons(bars: ModuleType, name: str) -> None:
    """Narayanan et al. (arXiv 2104.04473), equation 3 without the forward pass that it repeats."""
    config = load(str(ROOT / "configs" / f"{name}.py"))
    model, B, s = config.model, config.train.global_batch, config.model.seq_len
    layers, h, V = model.n_layers, model.d_model, model.padded_vocab
    expected = 72 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (12 * layers * h))
    assert bars.megatron_flops(config) == pytest.approx(expected, rel=1e-9)


def test_rows_that_are_not_asked_for_are_kept(bars: ModuleType, tmp_path: Path) -> None:
    def write(name: str, *configs: str) -> None:
        rows = [ROW | {"config": config} for config in configs]
        (tmp_path / name).write_text(
            json.dumps({"tables": {"Compiled": {"rows": rows}}}), encoding="utf-8"
        )

    record = SimpleNamespace(
        directory=tmp_path, stem="bars_2026-11-24_h100-jax-0", data={"date": "2026-11-24"}
    )
    assert bars.kept(record) == {}
    write("bars_base_h100-jax-0.json", "gpt_175b")
    write("bars_2026-11-20_h100-jax-0.json", "megatron_16b")
    assert set(bars.kept(record)) == {"megatron_16b"}, "of the newest results, and not of the base"
    write("bars_2026-11-24_h100-jax-0.json", "megatron_16b", "gpt_1_3b")
    assert set(bars.kept(record)) == {"megatron_16b", "gpt_1_3b"}
    base = SimpleNamespace(
        directory=tmp_path, stem="bars_base_h100-jax-0", data={"date": "2026-11-24"}
    )
    assert set(bars.kept(base)) == {"gpt_175b"}
