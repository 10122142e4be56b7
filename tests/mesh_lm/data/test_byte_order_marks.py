"""A byte order mark, which editors on Windows write before UTF-8 text, is no part of the text."""

import contextlib
import gzip
import io
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from mesh_lm.commands.generate import _from_file
from mesh_lm.data import formats, sources
from mesh_lm.data.indexed import Documents
from mesh_lm.data.prepare import plan, run
from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference.perplexity import read_texts

MARK = b"\xef\xbb\xbf"
# a mark within a text is one of its characters
TEXT = "".join(f"line {number} \ufeff naïve\n" for number in range(40))


class Here:
    """A pool that does its work where it is asked to, because starting a process takes longer than
    the rest."""

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_pool", lambda workers: contextlib.nullcontext(Here()))


def by_source(path: Path) -> list[str]:
    return ["".join(document.text for document in sources.find(str(path)).documents())]


def by_prepare(path: Path) -> list[str]:
    out = path.parent / "prepared"
    run.prepare((str(path),), str(out), "bytes", workers=1, output=io.StringIO())
    tokenizer = load_tokenizer("bytes")
    documents = Documents(out)
    return [tokenizer.decode(documents[i][:-1]) for i in range(len(documents))]


def by_evaluation(path: Path) -> list[str]:
    return list(read_texts(str(path)))


READERS = pytest.mark.parametrize("read", [by_source, by_prepare, by_evaluation])


@READERS
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "in/a.txt", "in/a.html"])
def test_text(tmp_path: Path, read: Callable[[Path], list[str]], name: str) -> None:
    """By its name and in a directory, compressed or not."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    content = MARK + TEXT.encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(file.parent if name.startswith("in/") else file) == [TEXT]


def test_a_text_of_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first has the mark."""
    monkeypatch.setattr(plan, "SHARD", 64)
    (tmp_path / "a.txt").write_bytes(MARK + TEXT.encode())
    assert len(plan.make([str(tmp_path / "a.txt")], "text").units) > 5
    assert by_prepare(tmp_path / "a.txt") == [TEXT]


def test_the_byte_that_is_not_utf_8_is_counted_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(MARK + b"a\nb\xff\n")
    with pytest.raises(ConfigError, match=r"a\.txt is not text in UTF-8 \(byte 6\)"):
        by_source(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_only_a_corpus_that_kept_marks_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An older version kept them in text, and never in JSON lines; a corpus without marks keeps its
    name."""
    line = TEXT if name == "a.txt" else json.dumps({"text": "a"}) + "\n"
    for mark in (b"", MARK):
        (tmp_path / name).write_bytes(mark + line.encode())
        digest = sources.find(str(tmp_path / name)).digest()
        with monkeypatch.context() as patch:
            patch.setattr(formats, "has_mark", lambda path: False)
            assert (sources.find(str(tmp_path / name)).digest() != digest) is (
                bool(mark) and name == "a.txt"
            )


def test_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(MARK + b"the sea\r\nthe boat\r\n")
    (tmp_path / "p.jsonl").write_bytes(MARK + b'{"prompt": "the sea"}\r\n')
    assert list(_from_file(str(tmp_path / "p.txt"))) == ["the sea", "the boat"]
    assert list(_from_file(str(tmp_path / "p.jsonl"))) == ["the sea"]


@READERS
def test_a_line_of_a_mark_alone(tmp_path: Path, read: Callable[[Path], list[str]]) -> None:
    (tmp_path / "a.jsonl").write_bytes(MARK + b"\r\n" + b'{"text": "the sea"}\r\n')
    assert read(tmp_path / "a.jsonl") == ["the sea"]
