"""The guide: which strategy, and why; and the committed studies are those of today's formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_lm.config import load
from mesh_lm.planning.studies.guide import advice, reason
from mesh_lm.planning.studies.output import read_csv
from mesh_lm.planning.studies.replica_bytes import BytesRow, replica_bytes
from mesh_lm.planning.studies.scaling import ScalingRow, ShareRow
from mesh_lm.planning.studies.strategies import StrategyRow, side_by_side
from tests.docs.guide_tables import scaling

STUDIES = Path(__file__).parents[4] / "docs" / "studies"


def row(strategy: str, seconds: float = 1.0, fits: bool = True, gpus: int = 8) -> StrategyRow:
    return StrategyRow(
        "1b", 1, gpus, strategy, "" if fits else "does not fit: 90 GiB", fits, peak_gib=50.0 if fits else 90.0,
        step_fast_s=seconds, step_slow_s=seconds, mfu_fast=0.5, mfu_slow=0.4, waits=0.2, options=f"--rules={strategy}",
    )  # fmt: skip


UNSERVED = StrategyRow("1b", 1, 8, "DDP", "more GPUs than sequences", False)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row("DDP"), row("3D", 0.95)], "the fewest decisions; the fastest, 3D, would gain 5%"),
        ([row("DDP"), row("3D")], "nothing is faster"),
        ([row("DDP", fits=False), row("3D")], "DDP does not fit (90 GiB at least)"),
        (
            [row("DDP", 1.5), row("ZeRO-1", 1.6), row("3D")],
            "DDP and ZeRO-1 take 50% to 60% longer than 3D, and waits for the network are 20% of the step",
        ),
        ([UNSERVED, row("3D")], "pure data parallelism: more GPUs than sequences"),
        ([row("DDP", fits=False)], "nothing fits: the smallest layout needs 90 GiB"),
        ([UNSERVED], "no layout divides the model and the batch"),
    ],
)
def test_the_reason(rows: list[StrategyRow], text: str) -> None:
    assert reason(rows) == text


def test_neighbouring_numbers_of_gpus_are_one_row() -> None:
    rows = [row("DDP"), row("DDP", gpus=16), row("DDP", fits=False, gpus=32), row("3D", gpus=32)]
    first, second = advice(rows)
    assert (first.first_gpus, first.last_gpus, first.strategy) == (8, 16, "DDP")
    assert (second.first_gpus, second.strategy, second.options) == (32, "3D", "--rules=3D")
    assert first.mfu == (0.4, 0.5)


def test_the_committed_bytes_are_those_of_the_forms() -> None:
    rows = read_csv((STUDIES / "bytes.csv").read_text(encoding="utf-8"), BytesRow)
    counts = sorted({one.gpus for one in rows})
    for old, new in zip(rows, replica_bytes(load("gpt_1_3b"), counts), strict=True):
        assert old[:4] == new[:4]
        assert old[4:] == pytest.approx(new[4:], rel=1e-5)


@pytest.mark.parametrize(("n_params", "size", "gpus"), [(1e9, "1b", 64), (3e10, "30b", 512)])
def test_the_committed_strategies_are_those_of_the_formulas(
    n_params: float, size: str, gpus: int
) -> None:
    """Two points: mesh-lm study strategies --output=docs/studies makes all of them again."""
    rows = read_csv((STUDIES / "strategies.csv").read_text(encoding="utf-8"), StrategyRow)
    old = [one for one in rows if (one.size, one.gpus) == (size, gpus)]
    new = side_by_side([n_params], [gpus], "h100", seq_len=4096, batch=2048)
    for old_row, new_row in zip(old, new, strict=True):
        assert (old_row.strategy, old_row.status, old_row.options) == (
            new_row.strategy, new_row.status, new_row.options,
        )  # fmt: skip
        for name in ("state_gib", "peak_gib", "between_gib", "step_fast_s", "step_slow_s"):
            old_value = getattr(old_row, name)
            new_value = getattr(new_row, name)
            assert old_value == (new_value and pytest.approx(new_value, rel=1e-5)), name


def test_the_committed_scaling_is_complete() -> None:
    """One batch at eight numbers of GPUs, compiled in less than 45 minutes; more GPUs are never
    slower; and the communication is that of the same steps."""
    rows = scaling("strong")
    assert [row.gpus for row in rows] == [96, 144, 288, 576, 1152, 2304, 3072, 4608]
    assert {(row.config, row.batch, row.status) for row in rows} == {("megatron_177b", 1152, "")}
    assert sum(row.seconds for row in rows) < 45 * 60
    steps = [row.step_fast_s or 0.0 for row in rows]
    assert steps == sorted(steps, reverse=True)
    _require_consistent("strong", rows)


def test_the_committed_models_that_grow_are_complete() -> None:
    rows = scaling("weak")
    assert [row.gpus for row in rows] == [48, 96, 192, 384, 768, 1536, 2304, 3072, 6144]
    assert len({row.config for row in rows}) == 9 and not any(row.status for row in rows)
    _require_consistent("weak", rows)


def _require_consistent(study: str, rows: list[ScalingRow]) -> None:
    """Each point fits, stands beside a published one, and has the communication of its step."""
    assert all(row.peak_gib and row.peak_gib < 72.8 and row.published_tflops for row in rows)
    text = (STUDIES / study / f"{study}_communication.csv").read_text(encoding="utf-8")
    for row in rows:
        shares = [share for share in read_csv(text, ShareRow) if share.gpus == row.gpus]
        assert sum(share.sent_gib for share in shares) == pytest.approx(row.sent_gib, rel=1e-3)
        waits = sum(share.waits_s for share in shares)
        assert waits == pytest.approx(row.waits_fast_s, rel=0.02, abs=1e-3)
