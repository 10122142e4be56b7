"""The compilation cache: an entry that is not as it was written never reaches JAX, and is compiled
again."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

from mesh_lm.distributed import compile_cache
from mesh_lm.distributed.compile_cache import VerifiedPath
from mesh_lm.errors import ConfigError

CONTENT = bytes(range(200))


def entry(directory: Path, name: str = "jit_step-cache") -> VerifiedPath:
    """A new path to an entry, as JAX makes one for each read and write."""
    return VerifiedPath(str(directory)) / name


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of an entry."""
    entry(tmp_path).write_bytes(CONTENT)
    return tmp_path / "jit_step-cache"


def test_an_entry_is_read_as_it_was_written(written: Path) -> None:
    path = entry(written.parent)
    assert path.exists()
    assert path.read_bytes() == CONTENT
    assert entry(written.parent).read_bytes() == CONTENT
    assert [file.name for file in written.parent.iterdir()] == [written.name], (
        "no temporary file is left"
    )
    assert [
        (file.name, file.stat().length)
        for file in VerifiedPath(str(written.parent)).glob("*-cache")
    ] == [(written.name, 200 + 32)]


def test_no_flipped_bit_is_read(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = written.read_bytes()
    root = VerifiedPath(str(written.parent))
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        written.write_bytes(bad)
        assert not (root / written.name).exists(), bit
        assert not written.exists(), bit
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 * len(good)
    assert "jit_step-cache in " in lines[-1]
    assert lines[-1].endswith(f"deleted and compiled again ({8 * len(good)} so far)")


@pytest.mark.parametrize(
    "damage", ["empty", "truncated", "longer", "without digest", "under another name"]
)
def test_other_damage_is_not_read_either(written: Path, damage: str) -> None:
    intact = written.read_bytes()
    changed = {
        "empty": b"",
        "truncated": intact[:100],
        "longer": intact + b"\0",
        "without digest": CONTENT,
        "under another name": intact,
    }[damage]
    name = "jit_init-cache" if damage == "under another name" else written.name
    (written.parent / name).write_bytes(changed)
    with pytest.raises(FileNotFoundError):
        entry(written.parent, name).read_bytes()
    assert not (written.parent / name).exists()


def test_an_entry_that_cannot_be_deleted_is_not_read_and_is_replaced(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, missing_ok: bool = False) -> None:
        if not missing_ok:
            raise PermissionError

    written.write_bytes(b"damaged")
    monkeypatch.setattr(Path, "unlink", denied)
    path = entry(written.parent)
    assert not path.exists()
    path.write_bytes(CONTENT)
    assert entry(written.parent).read_bytes() == CONTENT


def test_files_that_are_no_entries_are_plain(tmp_path: Path) -> None:
    (VerifiedPath(str(tmp_path)) / "jit_step-atime").write_bytes(b"12345678")
    assert (tmp_path / "jit_step-atime").read_bytes() == b"12345678"


def test_an_address_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.compile_cache=gs://bucket/cache must be a directory; mount"
    ):
        compile_cache.use("gs://bucket/cache")


PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp
from mesh_lm.distributed import compile_cache

compile_cache.use(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_compilation_cache_max_size", 1 << 20)  # JAX evicts entries, and keeps their times of use
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))

def outcome():
    jax.clear_caches()
    events.clear()
    value = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
    print(value, events.count("cache_hits"), events.count("cache_misses"), flush=True)

outcome()
outcome()
entries = sorted(pathlib.Path(sys.argv[1]).glob("verified/*-cache"))
for number, entry in enumerate(entries):
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
outcome()
outcome()
print(len(entries))
"""


def test_jax_compiles_again_what_is_damaged(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *lines, count = run.stdout.splitlines()
    first, second, *warnings, third, fourth = lines
    assert first == third == f"512.0 0 {count}", run.stdout
    assert second == fourth == f"512.0 {count} 0", run.stdout
    assert len(warnings) == int(count) >= 1
    assert all("is deleted and compiled again" in line for line in warnings)
