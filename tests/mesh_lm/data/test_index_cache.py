import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from processes import PATIENCE

from mesh_lm.data.index_cache import IndexCache
from mesh_lm.errors import ConfigError


def test_computed_once_and_memory_mapped(tmp_path: Path):
    lines: list[str] = []
    cache, calls = IndexCache(str(tmp_path), lines.append), []

    def compute() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"x": np.arange(5, dtype=np.int32), "y": np.ones((2, 3))}

    for _ in range(2):
        found = IndexCache(str(tmp_path), lines.append).get("kind", {"b": 1, "a": [2]}, compute, size=20, slow=20)
        assert found["x"].tolist() == [0, 1, 2, 3, 4] and found["x"].dtype == np.int32 and found["y"].shape == (2, 3)
        assert isinstance(found["x"].base, np.memmap) and not found["x"].flags.writeable
    assert len(calls) == 1 and len(lines) == 1 and "computing the kind index of 0 M items" in lines[0]
    cache.get("kind", {"a": [2], "b": 1}, compute)  # the order of the key's parts does not matter
    assert len(calls) == 1
    cache.get("kind", {"a": [2], "b": 2}, compute)
    cache.get("other", {"a": [2], "b": 1}, compute)
    assert len(calls) == 3 and len(lines) == 1


def test_a_failure_leaves_nothing(tmp_path: Path):
    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        IndexCache(str(tmp_path)).get("kind", {}, fail)
    assert not [path for path in (tmp_path / "indices").iterdir() if path.is_dir()]
    assert IndexCache(str(tmp_path)).get("kind", {}, lambda: {"x": np.zeros(1)})["x"].shape == (1,)


def racer(directory: Path, start, results) -> None:
    start.wait()

    def compute() -> dict[str, np.ndarray]:
        results.put("computed")
        return {"x": np.arange(100_000), "y": np.arange(100_000)}

    found = IndexCache(str(directory)).get("kind", {"n": 1}, compute)
    results.put(int(found["x"].sum() + found["y"].sum()))


def test_processes_that_race(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=racer, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    found = [results.get(timeout=PATIENCE) for _ in range(5)]
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert sorted(map(str, found)) == sorted(["computed", *["9999900000"] * 4])
    assert [path.name for path in (tmp_path / "indices").iterdir() if path.name.startswith(".")] in ([], [".kind.lock"])


def test_errors(tmp_path: Path):
    cache = IndexCache(str(tmp_path))
    cache.get("kind", {}, lambda: {"x": np.zeros(9)})
    (path,) = tmp_path.glob("indices/kind-*/x.npy")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"kind-\w+ is damaged .*; remove it to compute it again"):
        cache.get("kind", {}, lambda: {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot keep an index in .*file"):
        IndexCache(str(tmp_path / "file")).get("kind", {}, lambda: {"x": np.zeros(9)})
