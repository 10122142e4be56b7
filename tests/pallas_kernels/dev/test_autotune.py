"""The entries that measuring writes to the table of tiles, with invented times, on a copy."""

import json
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import BlockMask, describe_attention
from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper import ForwardTiles
from pallas_kernels.attention.mosaic import HEAD_DIMS
from pallas_kernels.dev import autotune

COMPILE_BUDGET = 8

THREE = autotune.Candidate("forward", (64, 64), ForwardTiles(128, 4, warpgroups=3))
favoured: list[autotune.Candidate] = []
"""What is timed as the fastest."""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the table replaces it; each timing advances a fake clock by a second."""
    clock = [0.0]
    favoured.clear()

    def time_of(candidate: autotune.Candidate, length: int, causal: bool, program: None) -> float:
        clock[0] += 1
        return candidate.tiles.block + candidate.tiles.stages - 1000 * (candidate in favoured)

    path = tmp_path / "tuning.json"
    shutil.copy(tuning.PATH, path)
    monkeypatch.setattr(tuning, "PATH", path)
    monkeypatch.setattr(autotune, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(autotune, "time_of", time_of)
    monkeypatch.setattr(
        autotune, "compiled", lambda candidates, length, causal: dict.fromkeys(candidates)
    )
    return path


def rows(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def test_each_shape_gets_its_fastest_tiles_above_those_that_nobody_timed(table: Path) -> None:
    untimed = rows(table)
    found = autotune.measure(seconds=1e9)
    assert len(found) == len(HEAD_DIMS) * 2 * len(autotune.LENGTHS)
    assert rows(table)[: len(found)] == json.loads(
        json.dumps(sorted(found, key=lambda row: -row["length"]))
    )
    assert rows(table)[len(found) :] == untimed
    for row in found:
        for kernel in autotune.KERNELS:
            tried = [one.tiles for one in autotune.passing(kernel, row["head_dims"])]
            assert row[kernel] == autotune.as_data(
                min(tried, key=lambda tiles: tiles.block + tiles.stages)
            )


def test_tiles_that_have_no_room_for_features_serve_calls_without_them(table: Path) -> None:
    [only] = (
        set(autotune.passing("forward", (64, 64), "full"))
        - set(autotune.passing("forward", (64, 64)))
    ) & {THREE}
    favoured.append(only)
    autotune.measure(seconds=1e9)
    entries = [tuning.TuningEntry.of(row) for row in rows(table)]

    def tiles(**features: Any) -> ForwardTiles:
        q = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
        problem = describe_attention(q, q, q, platform="gpu", capability=(9, 0), **features)
        device = jax.local_devices()[0].device_kind
        return next(entry for entry in entries if entry.serves(problem, device)).tiling.forward

    assert tiles(causal=False) == only.tiles
    for features in (
        {},
        {"causal": False, "softcap": 3.0},
        {"causal": False, "block_mask": BlockMask.strided(4096, size=128, stride=2)},
    ):
        assert tiles(**features) != only.tiles


@pytest.mark.slow
def test_no_two_candidates_are_the_same_kernel() -> None:
    """Slots that shared memory has no room for make no other kernel."""
    found = [
        one.tiles.stages
        for one in autotune.candidates(["forward"])
        if one.head_dims == (256, 256)
        and one.tiles == autotune.tiles_of("forward", block=64, stages=one.tiles.stages)
    ]
    assert found == [4]  # the first of 4, 3 and 2, of which it has room for 2


def test_the_file_has_every_candidate_once() -> None:
    lines = [
        autotune.of_line(line)
        for line in json.loads(autotune.CANDIDATES.read_text(encoding="utf-8"))["candidates"]
    ]
    assert len(set(lines)) == len(lines)
    for one in lines:
        assert one.tiles in autotune.tiles_to_try(one.kernel, one.head_dims)


def test_a_run_cut_short_replaces_only_the_rows_that_it_measured(table: Path) -> None:
    autotune.measure(seconds=1e9)
    before = rows(table)
    others = [before[0] | {"device": "another"}, before[0] | {"length": 10**6}]
    autotune.write(table, {"rows": [*before, *others]})
    shapes = list(autotune.order(autotune.LENGTHS))[:2]
    (again, *none) = autotune.measure(
        seconds=sum(len(autotune.passing(kernel, shapes[0][0])) for kernel in autotune.KERNELS)
    )
    assert not none and (again["head_dims"], again["causal"], again["length"]) == shapes[0]
    after = rows(table)
    lengths = [row["length"] for row in after if row.get("device") == again["device"]]
    assert lengths == sorted(lengths, reverse=True) and after[0] == others[1]
    assert len(after) == len(before) + 2 and all(row in after for row in (*before, *others))


def test_a_new_row_takes_the_place_of_the_old() -> None:
    old = {"device": "H", "head_dims": [64, 64], "causal": True, "length": 0, "dq": "old"}
    new = {**old, "head_dims": (64, 64), "dq": "new"}
    kept = [
        old | {"head_dims": [96, 96]},
        old | {"causal": False},
        old | {"device": None},
        old | {"length": 5},
    ]
    assert autotune.merged([new], [old, *kept]) == [kept[3], new, kept[0], kept[1], kept[2]]


def test_only_the_named_cases_are_timed(table: Path) -> None:
    found = autotune.measure(seconds=1e9, cases=[((128, 128), False, 16384)])
    assert [(row["head_dims"], row["causal"], row["length"]) for row in found] == [
        ((128, 128), False, 0)
    ]


def test_a_candidate_that_fails_is_left_out(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_of(candidate: autotune.Candidate, length: int, causal: bool, program: None) -> float:
        if candidate.tiles.block == 128:
            raise RuntimeError("illegal instruction")
        return 1.0

    monkeypatch.setattr(autotune, "time_of", time_of)
    (row,) = autotune.measure(seconds=1e9, cases=[((128, 128), False, 16384)])
    assert row["forward"]["block"] == 64 and row["dq"]["block"] == 64


def test_candidates_compile_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the kernels compile in the interpreter only, but in the threads that a GPU's would
    use."""
    (first, second) = autotune.passing("dq", (64, 64))[:2]

    def run(
        spec: object, candidate: autotune.Candidate, sides: dict, q: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        if candidate == second:
            raise ValueError("no such tiles")
        return 2 * q

    monkeypatch.setattr(autotune, "run", run)
    monkeypatch.setattr(
        autotune,
        "arguments",
        lambda candidate, length: autotune.shapes(candidate, length, 1, 1, 1, "bfloat16"),
    )
    programs = autotune.compiled([first, second], 128, causal=True)
    assert autotune.time_of(first, 128, True, programs[first]) > 0
    with pytest.raises(ValueError, match="no such tiles"):
        autotune.time_of(second, 128, True, programs[second])
