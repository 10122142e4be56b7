"""The SMs that the attention kernels leave idle on the published number of devices, config by config."""

import sys
from pathlib import Path

from mesh_lm.config import load

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import attention_occupancy as table  # noqa: E402

ENOUGH = 0.8
SHORT = {"gpt2_124m": 384, "gpt_175b": 384, "megatron_177b": 384, "megatron_314b": 512, "megatron_70b": 512}
"""Configs whose sequences are too short, and their blocks: fewer than four for each SM, so that the last ones are much of the whole."""


def test_every_config_keeps_the_sms_at_work_unless_its_sequences_are_short() -> None:
    rows = {row["name"]: row for row in table.rows()}
    assert set(rows) == set(table.PUBLISHED)
    poor = {name: row["forward_blocks"] for name, row in rows.items() if min(row["forward"], row["chosen"]) < ENOUGH}
    assert poor == SHORT


def test_grouped_heads_are_split_where_a_kv_head_is_too_little() -> None:
    rows = {row["name"]: row for row in table.rows()}
    assert {name for name, row in rows.items() if row["chosen"] > row["keys"]} == {"llama3_8b", "llama3_70b", "llama3_405b"}
    assert rows["llama3_405b"]["keys_blocks"] == 64 and rows["llama3_405b"]["keys"] < 0.25


def test_the_shapes_are_those_of_one_device() -> None:
    config = load(str(ROOT / "configs" / "llama3_70b.py"))
    assert table.local_shape(config, 1024) == (1024 // 4 // 128, 8192, 64 // 8, 8 // 8)
    assert table.local_shape(config, 512)[0] == 4
