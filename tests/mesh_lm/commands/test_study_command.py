"""`mesh-lm study`: files, tables and what it says without matplotlib or a compiler."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path
from typing import Any

import lab_report
import pytest

from mesh_lm.commands import study
from mesh_lm.commands.main import main
from mesh_lm.planning.studies import output
from mesh_lm.planning.studies.models import BATCH, SEQUENCE
from mesh_lm.planning.studies.output import csv_text, read_csv
from mesh_lm.planning.studies.replica_bytes import BytesRow
from mesh_lm.planning.studies.scaling import ScalingRow
from mesh_lm.planning.studies.strategies import StrategyRow
from sharding_rules.lab import LabError

PNG = b"\x89PNG"


def test_bytes_are_a_table_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "bytes", "gpt_1_3b", "--gpus=1..16", f"--output={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^DDP +0\.0 +4\.9 +7\.4 +8\.6 +9\.2$", out, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"bytes.csv", "bytes.png", "bytes.html"}
    assert (tmp_path / "bytes.png").read_bytes().startswith(PNG)
    with (tmp_path / "bytes.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["strategy"] == "DDP" and len(rows) == 5 * 10
    page = (tmp_path / "bytes.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page and "mesh-lm study bytes --gpus=1..16" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page), "the page needs another file"


def test_strategies_say_their_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sizes=1b", "--gpus=8,64", "--detail=1b@8", f"--output={tmp_path}"]
    assert main(["study", "strategies", *words]) == 0
    out = capsys.readouterr().out
    assert "The formulas were off compiled programs" in out and "1b on" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".png", ".html"}
    page = (tmp_path / "strategies.html").read_text(encoding="utf-8")
    assert "predicted, never measured" in page and "The formulas were off" in page
    assert page.count("data:image/png") == 3


def test_without_matplotlib_there_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "has_matplotlib", lambda: False)
    assert main(["study", "bytes", "--gpus=8", f"--output={tmp_path}"]) == 0
    assert "no pictures: matplotlib is not installed" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"bytes.csv", "bytes.html"}


def test_an_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["study", "strategies", "--sizes=1b", f"--output={tmp_path}/file"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot write the study to ") and err.count("\n") == 1


def test_scaling_is_compiled_at_each_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a compiler of our own; the second time nothing is compiled."""
    n_compiled = []

    def compiled(config: Any, n_devices: int) -> Any:
        n_compiled.append(n_devices)
        report = lab_report.report()
        memory = dataclasses.replace(report.memory, peak=2**30)
        return dataclasses.replace(report, memory=memory)

    monkeypatch.setattr(study, "_compiler", lambda target: compiled)
    words = ["megatron_1_7b", "--gpus=48,60,96", "--compiles=1", f"--output={tmp_path}"]
    assert main(["study", "scaling", *words]) == 0
    captured = capsys.readouterr()
    assert "60 devices do not fill whole nodes" in captured.out
    assert "published" in captured.out and "[1/3] megatron_1_7b on 48 GPUs" in captured.err
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "points.json", "strong_scaling.csv", "strong_communication.csv", "strong_scaling.html",
        "throughput.png", "efficiency.png", "communication.png",
    }  # fmt: skip
    rows = read_csv((tmp_path / "strong_scaling.csv").read_text(encoding="utf-8"), ScalingRow)
    assert [row.gpus for row in rows] == [48, 60, 96] and rows[0].published_tflops == 408.8

    n_compiled.clear()
    assert main(["study", "scaling", *words]) == 0
    assert not n_compiled and "kept from before" in capsys.readouterr().err


def test_without_a_compiler_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(target: str) -> Any:
        raise LabError("XLA's compiler for CUDA is missing; pip install -e '.[aot]'")

    monkeypatch.setattr(study, "_compiler", missing)
    assert main(["study", "scaling", "gpt_1_3b", "--gpus=8"]) == 1
    assert main(["study", "strategies", "--sizes=1b", "--gpus=8", "--compile=1"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and all("pip install -e '.[aot]'" in line for line in errors)


def test_the_defaults_are_those_of_the_family() -> None:
    options = study.Strategies()
    assert (options.seq_len, options.batch) == (SEQUENCE, BATCH)


def test_rows_survive_their_csv() -> None:
    rows = [
        StrategyRow("1b", 10**9, 8, "DDP", "", True, state_gib=1.5, compiled_fits=False),
        StrategyRow("1b", 10**9, 8, "3D", "no, it does not", False),
    ]
    assert read_csv(csv_text(rows), StrategyRow) == rows
    sent = [BytesRow("DDP", "ddp", 8, "", 9.2e9, 9.2e9, 0.0, 1.0, 7.0)]
    assert read_csv(csv_text(sent), BytesRow) == sent
