"""The SMs that the attention kernels leave idle on the published number of devices, config by
config."""

import sys
from pathlib import Path

from mesh_lm.config import load

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import attention_occupancy as table  # noqa: E402

ENOUGH = 0.9


def test_every_config_keeps_the_sms_at_work() -> None:
    """Even those with short sequences, because the long tiles of a causal mask come first."""
    rows = {row["name"]: row for row in table.rows()}
    assert set(rows) == set(table.PUBLISHED)
    assert not {
        name: row for name, row in rows.items() if min(row["forward"], row["chosen"]) < ENOUGH
    }
    assert rows["gpt_175b"]["forward_blocks"] == 768  # fewer than six for each SM


def test_grouped_heads_are_split_where_a_kv_head_is_too_little() -> None:
    rows = {row["name"]: row for row in table.rows()}
    assert {name for name, row in rows.items() if row["chosen"] > row["keys"]} == {
        "llama3_70b",
        "llama3_405b",
    }
    assert rows["llama3_405b"]["keys_blocks"] == 64 and rows["llama3_405b"]["keys"] < 0.25


def test_the_shapes_are_those_of_one_device() -> None:
    config = load(str(ROOT / "configs" / "llama3_405b.py"))
    assert table.local_shape(config, 16_384) == (2048 // 8 // 256, 8192, 128 // 8, 8 // 8)
    assert table.local_shape(config, 8192)[0] == 2
