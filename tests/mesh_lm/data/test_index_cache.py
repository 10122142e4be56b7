import errno
import multiprocessing
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import PATIENCE

from mesh_lm.data import index_cache
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.errors import ConfigError


def test_computed_once_and_memory_mapped(tmp_path: Path):
    lines: list[str] = []
    cache = IndexCache(str(tmp_path), lines.append)
    calls = []

    def compute() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"x": np.arange(5, dtype=np.int32), "y": np.ones((2, 3))}

    for _ in range(2):
        arrays = IndexCache(str(tmp_path), lines.append).get(
            "kind", {"b": 1, "a": [2]}, compute, size=20, slow=20
        )
        assert (
            arrays["x"].tolist() == [0, 1, 2, 3, 4]
            and arrays["x"].dtype == np.int32
            and arrays["y"].shape == (2, 3)
        )
        assert isinstance(arrays["x"].base, np.memmap) and not arrays["x"].flags.writeable
    assert (
        len(calls) == 1 and len(lines) == 1 and "computing the kind index of 0 M items" in lines[0]
    )
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

    arrays = IndexCache(str(directory)).get("kind", {"n": 1}, compute)
    results.put(int(arrays["x"].sum() + arrays["y"].sum()))


def test_processes_that_race(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    results = context.Queue()
    processes = [context.Process(target=racer, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    outcomes = [results.get(timeout=PATIENCE) for _ in range(5)]
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert sorted(map(str, outcomes)) == sorted(["computed", *["9999900000"] * 4])
    assert [
        path.name for path in (tmp_path / "indices").iterdir() if path.name.startswith(".")
    ] in ([], [".kind.lock"])


def fresh() -> dict[str, np.ndarray]:
    return {"x": np.arange(99, dtype=np.int32), "y": np.ones((2, 3))}


def read(cache: IndexCache, key: dict) -> dict[str, list]:
    return {name: array.tolist() for name, array in cache.get("kind", key, fresh).items()}


def damages(directory: Path, other: Path) -> Iterator[tuple[str, str]]:
    """Damages an index, and yields what it did and what the log says of it."""
    x = directory / "x.npy"
    sums = directory / "digests.json"
    intact = x.read_bytes()
    for position in (0, 8, 60, len(intact) - 1):  # magic, length of the header, header, data
        x.write_bytes(intact[:position] + bytes([intact[position] ^ 16]) + intact[position + 1 :])
        yield f"flip {position}", "CRC-32 of x.npy"
    for size in (0, 40, len(intact) - 4):
        x.write_bytes(intact[:size])
        yield f"truncate to {size}", "CRC-32 of x.npy"
    x.unlink()
    yield "missing array", "x.npy is missing"
    x.write_bytes((directory / "y.npy").read_bytes())
    yield "one under another's name", "CRC-32 of x.npy"
    (directory / "z.npy").write_bytes(intact)
    yield "one too many", "CRC-32 of z.npy"
    sums.unlink()
    yield "no digests, as of earlier versions", r"has no digests \(older version\)"
    for text in ("", "[" * 9999, '{"x.npy": {}}', '{"x.npy": 1}'):
        sums.write_text(text, encoding="utf-8")
        yield text, "(CRC-32 of|digests.json: )"
    shutil.rmtree(directory)
    shutil.copytree(other, directory)
    yield "another's directory", "CRC-32 of"


def test_a_damaged_index_is_named_and_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cache = IndexCache(str(tmp_path))
    intact = read(cache, {"n": 1})
    n_damages = 0
    (directory,) = tmp_path.glob("indices/kind-*")
    read(cache, {"n": 2})
    (other,) = {*tmp_path.glob("indices/kind-*")} - {directory}
    for n_damages, (damage, reason) in enumerate(damages(directory, other), 1):
        capsys.readouterr()
        assert read(cache, {"n": 1}) == intact, damage
        out = capsys.readouterr().out
        reason = (
            reason if "older version" in reason else rf"is not as it was written \({reason}.*\)"
        )
        message = (
            rf"warning: index cache: {directory.name} in {directory.parent} {reason}; it is computed "
            r"again"
        )
        assert re.search(rf"{message} \({n_damages} so far\)\n$", out) and out.count("\n") == 1, (
            damage,
            out,
        )
        assert read(cache, {"n": 1}) == intact and not capsys.readouterr().out, "it is kept"
    assert n_damages == 16 and {*(tmp_path / "indices").iterdir()} == {directory, other}


@pytest.mark.parametrize("failing", ["lock", "rename"])
def test_an_index_of_an_older_version_in_a_cache_of_others_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    """A read-only cache refuses the lock file, and a directory of another user its renaming; the
    tests may run as root, who may both."""
    lines: list[str] = []
    cache = IndexCache(str(tmp_path), lines.append)
    intact = read(cache, {"n": 1})
    (directory,) = tmp_path.glob("indices/kind-*")

    def refuse(path: Path, *arguments: object) -> None:
        raise OSError(errno.EROFS if failing == "lock" else errno.EPERM, "refused", str(path))

    monkeypatch.setattr(index_cache, "_lock", refuse) if failing == "lock" else monkeypatch.setattr(
        index_cache.os, "rename", refuse
    )
    (directory / "digests.json").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot keep an index in .*refused"):
        read(cache, {"n": 1})  # damaged
    (directory / "digests.json").unlink()
    assert read(cache, {"n": 1}) == intact
    assert lines == [
        (
            f"{directory} has no digests (older version), and cannot be written (refused): it is "
            "read unverified"
        )
    ]
    (directory / "x.npy").write_bytes(b"")
    for key in (1, 2):  # damaged, and not there
        with pytest.raises(ConfigError, match="cannot keep an index"):
            read(cache, {"n": key})


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = IndexCache(str(tmp_path))
    cache.get("kind", {}, lambda: {"x": np.zeros(9)})
    monkeypatch.setattr(index_cache, "_store", lambda directory, arrays: None)
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.cache: .*other-\w+ was written just now, but digests\.json is missing; its "
            r"disk is failing"
        ),
    ):
        cache.get("other", {}, lambda: {})
    monkeypatch.undo()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot keep an index in .*file"):
        IndexCache(str(tmp_path / "file")).get("kind", {}, lambda: {"x": np.zeros(9)})
