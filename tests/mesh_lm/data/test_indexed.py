import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh_lm.data.indexed import Documents, bin_path, idx_path, write_documents
from mesh_lm.errors import ConfigError

DOCUMENTS = [np.array([5, 6, 7]), np.array([], np.int64), np.array([8])]


def megatron_index(code: int, itemsize: int, lengths: list[int], indices: list[int]) -> bytes:
    """Compares with the bytes that Megatron's _IndexWriter writes, assembled by hand."""
    pointers = [itemsize * sum(lengths[:i]) for i in range(len(lengths))]
    header = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<QQ", len(lengths), len(indices))
    )
    return header + struct.pack(
        f"<{len(lengths)}i{len(pointers)}q{len(indices)}q", *lengths, *pointers, *indices
    )


@pytest.mark.parametrize("vocab, code, letter, size", [(65499, 8, "H", 2), (65500, 4, "i", 4)])
def test_bytes_are_megatrons(tmp_path: Path, vocab: int, code: int, letter: str, size: int):
    written = write_documents(tmp_path / "x", DOCUMENTS, vocab=vocab)
    assert idx_path(tmp_path / "x").read_bytes() == megatron_index(
        code, size, [3, 0, 1], [0, 1, 2, 3]
    )
    assert bin_path(tmp_path / "x").read_bytes() == struct.pack(f"<4{letter}", 5, 6, 7, 8)
    assert len(written) == 3
    assert [d.tolist() for d in written] == [[5, 6, 7], [], [8]]


def test_reads_several_sequences_per_document(tmp_path: Path):
    idx_path(tmp_path / "m").write_bytes(megatron_index(4, 4, [2, 1, 3], [0, 2, 3]))
    bin_path(tmp_path / "m").write_bytes(struct.pack("<6i", 1, 2, 3, 70000, 5, 6))
    assert [d.tolist() for d in Documents(tmp_path / "m")] == [[1, 2, 3], [70000, 5, 6]]


def test_no_documents(tmp_path: Path):
    assert len(write_documents(tmp_path / "x", [], vocab=10)) == 0


@pytest.mark.parametrize("ids", [[10], [-1, 3]])
def test_ids_outside_the_vocabulary(tmp_path: Path, ids: list[int]):
    with pytest.raises(ValueError, match="outside of the vocabulary 0 to 9"):
        write_documents(tmp_path / "x", [np.array(ids)], vocab=10)


def flip(path: Path, position: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)


INDEX_SIZE = 34 + 3 * 12 + 4 * 8
DAMAGE = {
    "missing bin": lambda p: bin_path(p).unlink(),
    "missing idx": lambda p: idx_path(p).unlink(),
    "empty idx": lambda p: os.truncate(idx_path(p), 0),
    "short header": lambda p: os.truncate(idx_path(p), 33),
    "truncated idx": lambda p: os.truncate(idx_path(p), INDEX_SIZE - 1),
    "longer idx": lambda p: os.truncate(idx_path(p), INDEX_SIZE + 3),
    "truncated bin": lambda p: os.truncate(bin_path(p), 7),
    "longer bin": lambda p: os.truncate(bin_path(p), 10),
    "foreign": lambda p: idx_path(p).write_bytes(b"TNTIDX\x00\x00" + bytes(100)),
    "version": lambda p: flip(idx_path(p), 9, b"\x02"),
    "float tokens": lambda p: flip(idx_path(p), 17, b"\x07"),
    "negative length": lambda p: flip(idx_path(p), 34 + 4, struct.pack("<2i3q", -1, 1, 0, 6, 4)),
    "pointers": lambda p: flip(idx_path(p), 34 + 12, struct.pack("<q", 2)),
    "document indices": lambda p: flip(idx_path(p), INDEX_SIZE - 8, struct.pack("<q", 2)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(tmp_path: Path, damage: str):
    write_documents(tmp_path / "x", DOCUMENTS, vocab=100)
    DAMAGE[damage](tmp_path / "x")
    with pytest.raises(ConfigError, match=r"x\.bin" if damage.endswith("bin") else r"x\.idx"):
        Documents(tmp_path / "x")


def test_exception_in_the_middle_leaves_what_was_there(tmp_path: Path):
    def interrupted():
        yield np.arange(100)
        raise KeyboardInterrupt

    write_documents(tmp_path / "x", DOCUMENTS, vocab=100)
    with pytest.raises(KeyboardInterrupt):
        write_documents(tmp_path / "x", interrupted(), vocab=100)
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.digests", "x.idx"]
    assert Documents(tmp_path / "x").tokens.tolist() == [5, 6, 7, 8]


def test_disk_error_names_the_file_and_leaves_nothing(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # write() fails beyond 1 MiB, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"x\.bin"):
            write_documents(tmp_path / "x", [np.zeros(2**20, np.int64)] * 2, vocab=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="nowhere"):
        write_documents(tmp_path / "nowhere" / "x", DOCUMENTS, vocab=100)


def test_the_index_is_renamed_last_after_all_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("sync"), fsync(file)))
    monkeypatch.setattr(
        os, "replace", lambda source, path: (events.append(path.name), replace(source, path))
    )
    write_documents(tmp_path / "x", DOCUMENTS, vocab=100)
    assert events == ["sync"] * 3 + ["x.bin", "x.digests", "x.idx"]


KILLED_WRITER = """
import sys, time
import numpy as np
from mesh_lm.data.indexed import write_documents
def documents():
    for _ in range(100):
        yield np.ones(50_000, np.int64)
    print("writing", flush=True)
    time.sleep(60)
write_documents(sys.argv[1], documents(), vocab=100)
"""


def test_killed_writer_leaves_what_was_there(tmp_path: Path):
    write_documents(tmp_path / "x", DOCUMENTS, vocab=100)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, tmp_path / "x"],
        stdout=subprocess.PIPE,
        env=child_env(),
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        writer.send_signal(signal.SIGKILL)
    assert Documents(tmp_path / "x").tokens.tolist() == [5, 6, 7, 8]
    assert sorted(n for n in os.listdir(tmp_path) if not n.startswith(".")) == [
        "x.bin",
        "x.digests",
        "x.idx",
    ]
    write_documents(tmp_path / "x", [np.array([1])], vocab=100)
    assert Documents(tmp_path / "x").tokens.tolist() == [1]


def child_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
