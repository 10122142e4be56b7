"""Files of a directory are read as what their names say, or refused by name: by `data.path` and by
`prepare` alike."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mesh_lm.data import formats, sources
from mesh_lm.data.indexed import Documents
from mesh_lm.data.prepare import run
from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError

ROWS = [{"id": i, "text": f"text {i} caf\u00e9"} for i in range(5)]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LIST = json.dumps(ROWS, indent=1).encode()
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": zstandard.compress
}  # fmt: skip


def by_source(path: Path) -> list[str]:
    return [document.text for document in sources.find(str(path)).documents()]


def by_prepare(path: Path, **options: bool) -> list[str]:
    prefix = path.parent / "prepared" / path.name
    ids = load_tokenizer("bytes")
    prefix.parent.mkdir(exist_ok=True)
    run.prepare((str(path),), str(prefix), "bytes", workers=1, output=io.StringIO(), **options)
    documents = Documents(prefix)
    return [ids.decode(documents[i][:-1]) for i in range(len(documents))]


class _Here:
    """A pool that does its work where it is asked to, because starting a process takes longer than
    the rest."""

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_pool", lambda workers: contextlib.nullcontext(_Here()))


READERS = pytest.mark.parametrize("read", [by_source, by_prepare])


@READERS
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", LINES), ("a.ndjson", LINES), ("a.json", LINES), ("a.JSON", LIST), ("a.json", LIST),
    ("a.json", b"\xef\xbb\xbf\n" + LIST),
], ids=["jsonl", "ndjson", "lines", "JSON", "list", "bom"])  # fmt: skip
def test_json(tmp_path: Path, read: Callable, name: str, content: bytes, compression: str) -> None:
    """In a directory and by its own name, the documents are those of its lines or of its list."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{name}{compression}").write_bytes(COMPRESS[compression](content))
    assert read(tmp_path / "in") == read(tmp_path / "in" / f"{name}{compression}") == TEXTS


@READERS
def test_any_compressed_text_of_a_directory_is_a_document(tmp_path: Path, read: Callable) -> None:
    (tmp_path / "in").mkdir()
    for number, (compression, compress) in enumerate(COMPRESS.items()):
        (tmp_path / "in" / f"{number}.html{compression}").write_bytes(
            compress(f"<p>{number}</p>".encode())
        )
    (tmp_path / "in" / "z.png.gz").write_bytes(gzip.compress(b"\x89PNG\xff\xff"))
    assert read(tmp_path / "in") == [f"<p>{number}</p>" for number in range(5)]


REFUSED = {
    "package.json": (
        json.dumps({"name": "x", "text": "t"}, indent=1).encode(),
        "holds neither JSON lines nor a list of objects",
    ),
    "deep.json": (b"[" * 100_000, "is not JSON: nested deeper"),
    "cut.json": (LIST[:-9], "is not JSON: "),
    "empty.json.gz": (b"", "no text"),
    "numbers.json": (b"[1, 2]", r"item 1: expected a JSON object with a string \"text\", got '1'"),
    "other.json": (
        b'{"id": 1, "body": "a"}\n',
        'other.json, line 1: this JSON object has no "text"; it has "body": choose one with --data.text_field',
    ),
    "a.tar": (b"file.txt\0\0\0text", "is an archive; extract it"),
    "a.tar.gz": (gzip.compress(b"file.txt\0\0\0text"), "is an archive; extract it"),
    "a.zip": (b"PK", "is an archive; extract it"),
    "a.jsonl.lz4": (b"\4\x22\x4d\x18", "is compressed in a way that is not read; decompress it"),
    "a.parquet.gz": (b"PAR1", "is compressed in a way that is not read; decompress it"),
    "a.txt.xz": (lzma.compress(b"text" * 99)[:-20], "is damaged or truncated"),
    "a.jsonl.bz2": (b"not bz2 at all", "is damaged or not of the type its name implies"),
}


@READERS
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, read: Callable, name: str) -> None:
    """The error names the file, in a directory and by itself; none is one document of raw JSON, and
    none is skipped."""
    content, answer = REFUSED[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(gzip.compress(b"") if name == "empty.json.gz" else content)
    for path in (tmp_path / "in", tmp_path / "in" / name):
        if name == "empty.json.gz" and read is by_source:
            assert read(path) == []  # `corpus.prepare` refuses a source without text
            continue
        with pytest.raises(ConfigError, match=answer) as refused:
            read(path)
        assert name in str(refused.value) or answer == "no text"


@READERS
def test_all_refused_files_are_listed(tmp_path: Path, read: Callable) -> None:
    (tmp_path / "in").mkdir()
    for number in range(10):
        (tmp_path / "in" / f"{number}.tar").write_bytes(b"a")
    with pytest.raises(
        ConfigError, match=r"10 files are not read as they are\n  - .*0\.tar is an archive"
    ) as refused:
        read(tmp_path / "in")
    assert str(refused.value).count("archive") == 8 and str(refused.value).endswith("and 2 more")


@READERS
def test_all_json_without_the_field_is_listed(tmp_path: Path, read: Callable) -> None:
    """Settings on one line look like JSON lines; those of a directory are named at once, not one
    per attempt."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lines.json").write_bytes(LINES)
    (tmp_path / "in" / "a.json").write_text(
        '{"compilerOptions": {"strict": true}}', encoding="utf-8"
    )
    (tmp_path / "in" / "b.json").write_text('\n\n{"name": "x"}\n', encoding="utf-8")
    (tmp_path / "in" / "c.json").write_text('{"compilerOptions":\n {}}', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "in")
    first, a, b, c = str(refused.value).split("\n  - ")
    assert first == "3 files are not read as they are"
    assert a.startswith(
        f"{tmp_path / 'in' / 'a.json'} holds neither JSON lines nor a list of objects with a "
        'string "text"; convert it'
    )
    assert b == (
        f'{tmp_path / "in" / "b.json"}, line 3: this JSON object has no "text"; it has "name": choose one with '
        "--data.text_field"
    )
    assert c.startswith(f"{tmp_path / 'in' / 'c.json'} holds neither JSON lines")


def test_a_first_line_without_the_field_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_bytes(b'{"compilerOptions": {}}\n' + LINES)
    assert by_prepare(tmp_path / "in", skip_bad_lines=True) == TEXTS


def test_the_kind_of_json_needs_its_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list on one line of 256 MiB is known by its first bytes, and a first line of JSON lines may
    be of any length."""
    with open(tmp_path / "list.json", "wb") as file:
        file.write(b"\xef\xbb\xbf\n [")
        file.truncate(2**28)
    tracemalloc.start()
    json_format = formats.Json()
    assert isinstance(json_format.resolve(tmp_path / "list.json"), formats.JsonList)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    monkeypatch.setattr(formats, "_BUFFER", 16)
    monkeypatch.setattr(formats, "_FIRST_LINE", 4096)
    # ends in the first buffer, at its end, behind it, and nowhere in what is read
    for n in (1, 16, 1000, 10_000):
        (tmp_path / "lines.json").write_bytes(
            b" " * 40 + b"\n" + json.dumps({"text": "a" * n}).encode() + b"\n{}\n"
        )
        assert isinstance(json_format.resolve(tmp_path / "lines.json"), formats.JsonLines)
    (tmp_path / "other.json").write_bytes(b'{"a":\n 1}')
    with pytest.raises(ConfigError, match="holds neither JSON lines nor a list"):
        json_format.resolve(tmp_path / "other.json")


def test_bad_items_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps([ROWS[0], 1, {"text": None}, ROWS[1]]), encoding="utf-8"
    )
    assert by_prepare(tmp_path / "a.json", skip_bad_lines=True) == TEXTS[:2]
    assert (
        json.loads((tmp_path / "prepared" / "a.json.json").read_text(encoding="utf-8"))[
            "skipped_lines"
        ]
        == 2
    )


@pytest.mark.parametrize(
    ("name", "changed"),
    [("a.jsonl", False), ("a.html.gz", False), ("a.json", True), ("a.txt.bz2", True)],
)
def test_a_corpus_of_an_older_version_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changed: bool
) -> None:
    """An older version read the .json of a directory as one document: what it prepared then is not
    what it is now."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(
        COMPRESS[Path(name).suffix](b"text") if name.endswith((".gz", ".bz2")) else LINES
    )
    digests = []
    made = []
    for older in (True, False):
        with monkeypatch.context() as patch:
            if older:
                patch.setattr(formats, "newly_read", lambda path: False)
            digests.append(sources.find(str(tmp_path / "in")).digest())
            try:
                run.prepare(
                    (str(tmp_path / "in"),),
                    str(tmp_path / "out"),
                    "bytes",
                    workers=1,
                    output=io.StringIO(),
                )
            except ConfigError as error:
                made.append(str(error))
    assert (digests[0] != digests[1]) is changed
    assert bool(made) is changed and (
        not made or "was made from other inputs or settings" in made[0]
    )


def test_a_parquet_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """As any with other than ASCII characters is for Python with LC_ALL=C."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    path = (tmp_path / "a.parquet").rename(tmp_path / "caf\udce9.parquet")
    assert [document.text for document in sources.find(str(path)).documents()] == ["one", "two"]
    assert formats.Parquet().row_groups(path, "text")[0].n_rows == 2
