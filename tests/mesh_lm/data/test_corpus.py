import dataclasses
import errno
import gzip
import hashlib
import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mesh_lm.config import DataConfig
from mesh_lm.data import corpus, encoding, reading, sources
from mesh_lm.data.corpus import prepare
from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError


def is_heldout(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 20 == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """80 text files in two levels, and files that must be skipped."""
    root = tmp_path / "text"
    (root / "sub" / ".hidden").mkdir(parents=True)
    for i in range(80):
        name = f"sub/{i}.md" if i % 2 else f"{i}.txt"
        # Held-out files repeat something that the training text lacks, to show which text the
        # vocabulary was trained on.
        (root / name).write_bytes(
            f"file {i}: {'zqj' * 50 if is_heldout(name) else 'the cat'}\r\nnaïve\n".encode()
        )
    (root / "empty.txt").touch()
    (root / "binary.dat").write_bytes(b"\xff\xfe\x00abc")
    (root / ".hidden.txt").write_text("secret", encoding="utf-8")
    (root / "sub" / ".hidden" / "x.txt").write_text("secret", encoding="utf-8")
    os.mkfifo(root / "pipe")
    return root


def config(path: Path | str, tmp_path: Path) -> DataConfig:
    return DataConfig(path=str(path), cache=str(tmp_path / "cache"))


def decoded(documents, tokenizer) -> list[str]:
    assert all(d[-1] == tokenizer.eod and tokenizer.eod not in d[:-1] for d in documents)
    return [tokenizer.decode(d[:-1]) for d in documents]


def test_directory(folder: Path, tmp_path: Path):
    made = prepare(config(folder, tmp_path), vocab=280)
    names = sorted([f"{i}.txt" for i in range(0, 80, 2)] + [f"sub/{i}.md" for i in range(1, 80, 2)])
    train = [(folder / n).read_bytes().decode() for n in names if not is_heldout(n)]
    heldout = [(folder / n).read_bytes().decode() for n in names if is_heldout(n)]
    tokenizer = made.tokenizer()
    assert decoded(made.train(), tokenizer) == train
    assert decoded(made.heldout(), tokenizer) == heldout
    joined = "".join(heldout).encode()
    assert (made.documents, made.heldout_documents, made.heldout_bytes) == (
        len(train),
        len(heldout),
        len(joined),
    )
    assert (made.train_tokens, made.heldout_tokens) == (
        len(made.train().tokens),
        len(made.heldout().tokens),
    )
    assert made.vocab_size == tokenizer.vocab_size <= 280
    assert made.gzip_bits_per_byte == 8 * len(gzip.compress(joined, 9, mtime=0)) / len(joined)
    assert made.xz_bits_per_byte == 8 * len(lzma.compress(joined, preset=9)) / len(joined)
    assert len(tokenizer.encode_batch(["the cat"])[0]) < 7
    # the vocabulary was not trained on the held-out text
    assert len(tokenizer.encode_batch(["zqj" * 50])[0]) == 150


def test_second_call_only_loads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = config(folder, tmp_path)
    made = prepare(settings, vocab=280)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_build", None)
        for path in folder.rglob("*"):
            os.utime(path)  # the contents count, not their date
        assert prepare(settings, vocab=280) == made
    assert prepare(settings, vocab=281).directory != made.directory
    (folder / "new.txt").write_text("new", encoding="utf-8")
    assert prepare(settings, vocab=280).documents == made.documents + 1
    monkeypatch.setattr(corpus, "_FORMAT", 2)
    assert prepare(settings, vocab=280).directory.name not in {made.directory.name}
    assert len(os.listdir(tmp_path / "cache")) == 4


def test_large_sources_are_known_by_size_and_date(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "_DIGEST_CONTENTS", 10)
    digest = sources.find(str(folder)).digest()
    assert sources.find(str(folder)).digest() == digest
    os.utime(folder / "0.txt", (1, 1))
    assert sources.find(str(folder)).digest() != digest


def test_pieces_batches_and_samples_change_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uncut = prepare(config(folder, tmp_path / "a"), vocab=280)
    lines: list[str] = []
    sampled: list[int] = []
    train = corpus.train_tokenizer
    monkeypatch.setattr(
        corpus,
        "train_tokenizer",
        lambda texts, vocab: sampled.append(sum(map(len, texts))) or train(texts, vocab),
    )
    monkeypatch.setattr(reading, "pieces", lambda text: encoding.pieces(text, 5))
    monkeypatch.setattr(encoding, "_PIECE", 5)
    monkeypatch.setitem(encoding.encode.__kwdefaults__, "batch", 17)
    monkeypatch.setattr(reading, "_REPORT", 500)
    monkeypatch.setattr(reading, "_BPE_CHARACTERS", 1000)
    monkeypatch.setattr(reading, "_BASELINE_BYTES", 100)
    cut = prepare(config(folder, tmp_path / "b"), vocab=280, progress=lines.append)
    assert decoded(cut.train(), cut.tokenizer()) == decoded(uncut.train(), uncut.tokenizer())
    assert decoded(cut.heldout(), cut.tokenizer()) == decoded(uncut.heldout(), uncut.tokenizer())
    assert cut.heldout_bytes == uncut.heldout_bytes
    assert any("encoded" in line for line in lines)
    assert 750 < sampled[0] <= 1000


def test_jsonl(tmp_path: Path):
    texts = [f"line {i}\nof a document" for i in range(1, 201)]
    rows = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    rows[4] = "  "  # a blank line is counted, but is not a document
    (tmp_path / "a b.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8-sig")
    made = prepare(config(tmp_path / "a b.jsonl", tmp_path), vocab=257)
    tokenizer = made.tokenizer()
    numbers = [i for i in range(1, 201) if i != 5]
    assert decoded(made.train(), tokenizer) == [
        texts[i - 1] for i in numbers if not is_heldout(str(i))
    ]
    assert decoded(made.heldout(), tokenizer) == [
        texts[i - 1] for i in numbers if is_heldout(str(i))
    ]
    assert made.directory.name.startswith("a_b-")


@pytest.mark.parametrize(
    "text, share",
    [
        ("".join(f"line {i}\n" for i in range(1000)), 0.05),
        ("a" * 50 + "\n" + "b" * 950 + "\n", 0.95),
    ],
)
def test_txt(tmp_path: Path, text: str, share: float):
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    made = prepare(config(tmp_path / "book.txt", tmp_path), vocab=257)
    (train,), (heldout,) = (
        decoded(made.train(), made.tokenizer()),
        decoded(made.heldout(), made.tokenizer()),
    )
    assert train + heldout == text
    assert train.endswith("\n")
    assert len(heldout) / len(text) == pytest.approx(share, abs=0.01)


def test_stdlib_is_found_without_its_tests():
    source = sources.find("stdlib")
    assert len(source.files) > 300
    assert "argparse.py" in source.files
    assert not any(
        "test" in name.split("/")[:-1] or "site-packages" in name for name in source.files
    )
    assert any(is_heldout(name) for name in source.files)


def test_several_processes_at_once_use_the_first_result(folder: Path, tmp_path: Path):
    inner = []

    def other_process(message: str) -> None:
        if message == "encoding" and not inner:
            inner.append(prepare(config(folder, tmp_path), vocab=280))
            stamps.update({p: p.stat().st_mtime_ns for p in inner[0].directory.iterdir()})

    stamps: dict[Path, int] = {}
    assert prepare(config(folder, tmp_path), vocab=280, progress=other_process) == inner[0]
    assert stamps == {p: p.stat().st_mtime_ns for p in inner[0].directory.iterdir()}
    assert len(os.listdir(tmp_path / "cache")) == 1


KILLED = """
import sys, time
from mesh_lm.config import DataConfig
from mesh_lm.data.corpus import prepare
from mesh_lm.data.tokenizer import load_tokenizer
def wait_at_encoding(message):
    if message == "encoding":
        print(message, flush=True)
        time.sleep(60)
prepare(DataConfig(path=sys.argv[1], cache=sys.argv[2]), vocab=280, progress=wait_at_encoding)
"""


def test_killed_preparation_leaves_no_corpus(folder: Path, tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", KILLED, folder, tmp_path / "cache"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"encoding\n"
        process.send_signal(signal.SIGKILL)
    assert all(name.startswith(".") for name in os.listdir(tmp_path / "cache"))
    assert prepare(config(folder, tmp_path), vocab=280).documents > 0


def test_exception_leaves_nothing(folder: Path, tmp_path: Path):
    def stop(message: str) -> None:
        if message == "encoding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(folder, tmp_path), vocab=280, progress=stop)
    assert os.listdir(tmp_path / "cache") == []


def test_incomplete_corpus_is_named(folder: Path, tmp_path: Path):
    made = prepare(config(folder, tmp_path), vocab=280)
    (made.directory / "corpus.json").write_text('{"documents":', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=rf"{made.directory.name} is not a complete corpus.*remove it"
    ):
        prepare(config(folder, tmp_path), vocab=280)


def test_every_file_of_a_cached_corpus_is_verified(folder: Path, tmp_path: Path):
    """Each is flipped, truncated and removed; an earlier version's corpus is read, with a
    notice."""
    made = prepare(config(folder, tmp_path), vocab=280)
    messages = []

    def read() -> None:
        reread = prepare(config(folder, tmp_path), vocab=280, progress=messages.append)
        assert reread.train().tokens.any() and reread.heldout().tokens.any()

    paths = sorted(made.directory.iterdir())
    assert len(paths) >= 8
    for path in paths:
        intact = path.read_bytes()
        for damaged in (
            intact[:-9] + bytes([intact[-9] ^ 1]) + intact[-8:],
            intact[: len(intact) // 2],
            None,
        ):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(
                ConfigError,
                match=rf"{made.directory}.*remove (it|{made.directory})|cannot read .*\.(bin|idx)",
            ):
                read()
        path.write_bytes(intact)
    read()
    assert not messages
    facts = json.loads((made.directory / "corpus.json").read_text(encoding="utf-8"))
    del facts["sealed"]
    (made.directory / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")
    (made.directory / "train.digests").unlink()
    read()
    assert [
        f"mesh-lm prepare seal {made.directory}/train {made.directory}/heldout" in line
        for line in messages
    ] == [True]


def heldout_line(is_held: bool) -> int:
    return next(i for i in range(1, 1000) if is_heldout(str(i)) == is_held)


BAD_LINES = {
    "not JSON": "{text}",
    "no text": '{"content": "x"}',
    "not an object": "[1]",
    "text is no string": '{"text": 3}',
    "lone surrogate": '{"text": "\\ud800"}',
    "not UTF-8": b'{"text": "\xff"}',
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_bad_jsonl_lines_are_numbered(tmp_path: Path, bad: str):
    line = BAD_LINES[bad]
    (tmp_path / "x.jsonl").write_bytes(
        b'{"text": "a"}\n\n' + (line if isinstance(line, bytes) else line.encode())
    )
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 3"):
        prepare(config(tmp_path / "x.jsonl", tmp_path), vocab=257)


def test_errors(tmp_path: Path):
    def fails(
        path: Path | str, message: str, cache: Path = tmp_path / "cache", vocab: int = 257
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            prepare(DataConfig(path=str(path), cache=str(cache)), vocab=vocab)
        assert not cache.is_dir() or os.listdir(cache) == []

    fails(tmp_path / "missing", "no such data file or directory")
    fails("stdlib", "data.tokenizer_vocab=256.*257", vocab=256)
    for name, contents, message in [
        ("a.txt", b"", "is a file of 0 bytes"),
        ("b.txt", b"one line", "single line"),
        ("c.txt", b"ok\n\xff\n", r"is not text in UTF-8 \(byte 3\)"),
        ("d.parquet", b"PAR1", r"d\.parquet is damaged or not a \.parquet"),
        (
            "d.csv",
            b"a,b",
            (
                r"type \.csv are not read as data; give one of \.txt, \.jsonl, \.ndjson, .* and \.parquet, "
                r"a "
                r"directory"
            ),
        ),
        ("e.jsonl", b"\n\n", "no text"),
        ("f.jsonl", b'{"text": ""}\n', "no text"),
        (
            "i.jsonl",
            b'{"id": 7, "content": "a", "url": "b"}',
            r'i.jsonl, line 1: this JSON object has no "text"; it has "content", "url": choose one with',
        ),
        ("h.jsonl", b"\n" * (heldout_line(True) - 1) + b'{"text": "a"}', "training split"),
    ]:
        (tmp_path / name).write_bytes(contents)
        fails(tmp_path / name, message)
    (tmp_path / "folder").mkdir()
    fails(tmp_path / "folder", "no files")
    (tmp_path / "folder" / "x.dat").write_bytes(b"\xff")
    fails(tmp_path / "folder", "no text")
    (tmp_path / "ok.txt").write_text("a\nb\n", encoding="utf-8")
    fails(tmp_path / "ok.txt", "data.cache=.*Not a directory", cache=tmp_path / "a.txt" / "cache")


def test_vocabulary_above_uint16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The dtype of the file follows the actual vocabulary, not the requested one."""
    (tmp_path / "x.txt").write_text("ab\n" * 40, encoding="utf-8")
    assert (
        prepare(config(tmp_path / "x.txt", tmp_path), vocab=100_000).train().tokens.dtype
        == np.uint16
    )


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path):
    texts = [f"line {i}\nof a document" for i in range(1, 101)]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    half = (
        zstandard.compress(lines[: len(lines) // 2]),
        zstandard.compress(lines[len(lines) // 2 :]),
    )
    # two frames, as parallel compressors write
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(half))
    pyarrow.parquet.write_table(
        pyarrow.table({"id": range(100), "body": texts}), tmp_path / "d.parquet", row_group_size=30
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    os.rename(tmp_path / "b.jsonl.gz", folder / "b.jsonl.gz")
    os.link(tmp_path / "d.parquet", folder / "d.parquet")
    (folder / "e.txt").write_text("single", encoding="utf-8")

    def documents(path: Path) -> list[str]:
        return [document.text for document in sources.find(str(path), "body").documents()]

    for name in ("a.jsonl", "c.jsonl.zst", "d.parquet"):
        assert documents(tmp_path / name) == texts
    assert documents(folder) == [*texts, *texts, "single"]
    (tmp_path / "f.txt.zst").write_bytes(zstandard.compress("\n".join(texts).encode()))
    assert "".join(documents(tmp_path / "f.txt.zst")) == "\n".join(texts)
    digests = {
        sources.find(str(tmp_path / "a.jsonl"), field).digest() for field in ("text", "body")
    }
    assert len(digests) == 2


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str):
    text = "".join(
        json.dumps({"text": f"{i} {hashlib.sha256(bytes([i])).hexdigest()}"}) + "\n"
        for i in range(200)
    ).encode()
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [str(i) for i in range(200)], "n": range(200)}), path
        )
        intact = path.read_bytes()
    else:
        intact = gzip.compress(text) if suffix == "jsonl.gz" else zstandard.compress(text)
    for bad in (intact[: len(intact) // 2], intact[:-5], b"hello" * 9):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=rf"x\.{suffix} is damaged"):
            list(sources.find(str(path)).documents())
    path.write_bytes(intact)
    assert len(list(sources.find(str(path)).documents())) == 200
    with pytest.raises(ConfigError, match='"body"'):
        list(sources.find(str(path), "body").documents())
    if suffix == "parquet":
        with pytest.raises(ConfigError, match='column "n" holds int64, not strings'):
            list(sources.find(str(path), "n").documents())


def test_a_directory_loses_nothing_in_silence(tmp_path: Path):
    """Every text file of a directory is read; only other files are skipped."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "b.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "root" / "b.md").write_text("two", encoding="utf-8")
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "root" / "sub" / "up").symlink_to(tmp_path / "root")
    root = str(tmp_path / "root")
    assert [document.text for document in sources.find(root).documents()] == ["two", "one"]
    (tmp_path / "root" / "c.txt.gz").write_bytes(gzip.compress(b"three" * 100)[:-9])
    with pytest.raises(ConfigError, match=r"c\.txt\.gz is damaged or truncated"):
        list(sources.find(root).documents())
    (tmp_path / "root" / "c.txt.gz").unlink()
    (tmp_path / "root" / "d.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"d\.txt is not UTF-8; convert it, or leave it out"):
        list(sources.find(root).documents())


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    scan = os.scandir

    def denied(path: str):
        if str(path).endswith("sub"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(
        ConfigError,
        match=r"cannot read .*/sub: Permission denied; make it readable, or leave it out",
    ):
        sources.find(str(tmp_path))


def test_a_given_tokenizer(folder: Path, tmp_path: Path):
    settings = dataclasses.replace(config(folder, tmp_path), tokenizer="bytes")
    made = prepare(settings, vocab=0, model_vocab=257)
    assert made.vocab_size == 257
    assert made.tokenizer().fingerprint == load_tokenizer("bytes").fingerprint
    assert made.heldout_tokens == made.heldout_bytes + made.heldout_documents
    (tmp_path / "t").mkdir()
    copy = str(load_tokenizer("bytes").save(tmp_path / "t"))
    # identified by its contents, not by its path
    assert prepare(dataclasses.replace(settings, tokenizer=copy), vocab=0) == made
    assert prepare(config(folder, tmp_path), vocab=257).directory != made.directory
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.tokenizer=bytes has ids up to 256, which model\.vocab_size=256 does not have; "
            r"set.*257"
        ),
    ):
        prepare(settings, vocab=0, model_vocab=256)
