"""Metrics for Weights & Biases, offline."""

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_lm.errors import ConfigError
from mesh_lm.report.weights_and_biases import WeightsAndBiases
from mesh_lm.report.writer import Writer


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"wandb=p needs the package wandb: pip install -e '\.\[wandb\]'"
    ):
        WeightsAndBiases("p", tmp_path, {})


def records(file: bytes) -> Iterator[bytes]:
    """Yields the records of a .wandb file of one 32 KiB block: LevelDB's log format (checksum u32,
    size u16, type u8) after 7 bytes."""
    at = 7
    while at < len(file):
        size, kind = struct.unpack("<4xHB", file[at : at + 7])
        assert kind == 1, "a record over two blocks"
        yield file[at + 7 : at + 7 + size]
        at += 7 + size


@pytest.mark.slow
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of one run have one id, every number is in W&B's own file, and a step after a
    rollback is logged again."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    for start, losses in ((0, {1: 3.0, 2: 2.5}), (1, {2: 2.25})):
        with Writer(
            tmp_path, start, also=WeightsAndBiases("tiny", tmp_path, {"seed": 7})
        ) as writer:
            for step, loss in losses.items():
                writer.write(step, {"loss": loss})
        time.sleep(1.1)  # W&B names the files of a run by the second

    history, ids = [], set()
    for file in sorted(
        tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime_ns
    ):
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project))
            if record.WhichOneof("record_type") == "history":
                row = {
                    (item.key or item.nested_key[0]): float(item.value_json)
                    for item in record.history.item
                }
                history.append((row["step"], row["train/loss"]))
    assert ids == {((tmp_path / "wandb_run").read_text(encoding="utf-8"), "tiny")}
    assert sorted(history) == [(1, 3), (2, 2.25), (2, 2.5)]
