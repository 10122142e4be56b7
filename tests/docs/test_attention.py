"""docs/attention.md: its code runs, its tables are what the choice does."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import BlockMask, choose_attention, describe_attention
from pallas_kernels.attention.api import IMPLEMENTATIONS

COMPILE_BUDGET = 16
TEXT = (Path(__file__).parents[2] / "docs/attention.md").read_text(encoding="utf-8")


def test_its_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = pallas_kernels.flash_attention
    # One program for each call, not one for each operation in it.
    monkeypatch.setattr(
        pallas_kernels,
        "flash_attention",
        lambda *x, **features: jax.jit(functools.partial(call, **features))(*x),
    )
    exec("\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.S)), {})


def test_the_table_of_gpus() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    rows = re.findall(r"^\| [^|]+ \| (?:to )?([\dx., ]+) \| (`.*`) \|$", TEXT, re.M)
    assert len(rows) == 4
    for capabilities, served in rows:
        first, *_ = names = re.findall(r"`(\w+)`", served)
        for capability in capabilities.replace("x", "9").split(", "):
            major, _, minor = capability.partition(".")
            choice = choose_attention(
                describe_attention(x, x, x, platform="gpu", capability=(int(major), int(minor)))
            )
            assert choice.name == first and set(IMPLEMENTATIONS) - set(names) == set(
                choice.rejected
            )


FEATURES = {
    "`window`": {"window": 16},
    "`softcap`, `sinks`": {"softcap": 2.0, "sinks": jax.ShapeDtypeStruct((4,), jnp.float32)},
    "`segment_ids`, for packed documents": {
        "segment_ids": jax.ShapeDtypeStruct((1, 256), jnp.int32)
    },
    "`q_offset`": {"q_offset": 128},
    "`block_mask`": {"block_mask": BlockMask.sliding(256, size=128, blocks=1)},
    "`return_lse`, with its gradient": {"return_lse": True},
}


@pytest.mark.parametrize("row", FEATURES)
def test_the_table_of_features(row: str) -> None:
    said = (
        next(line for line in TEXT.splitlines() if line.startswith(f"| {row} |"))
        .strip("| ")
        .split(" | ")[1:]
    )
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    rejected = choose_attention(
        describe_attention(x, x, x, platform="gpu", capability=(9, 0), **FEATURES[row])
    ).rejected
    for name, cell in zip(("mosaic", "cudnn", "xla"), said, strict=True):
        assert (name in rejected) == (cell in ("no", "0")), f"{row}: {name}"
