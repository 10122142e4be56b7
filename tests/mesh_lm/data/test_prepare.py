"""Tests of `python -m mesh_lm.data.prepare`: its output and its errors."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from mesh_lm.commands.prepare import main
from mesh_lm.data.indexed import Documents
from mesh_lm.data.prepare import plan, worker
from mesh_lm.data.prepare.plan import ReadPlan, TextShard
from mesh_lm.data.prepare.progress import Display
from mesh_lm.data.prepare.run import prepare
from mesh_lm.data.prepare.unfinished import Appender, Totals, Unfinished
from mesh_lm.data.prepare.worker import Encoded, Encoder, Settings
from mesh_lm.data.tokenizer import load_tokenizer, train_tokenizer
from mesh_lm.errors import ConfigError


def encoded(
    work: ReadPlan, tokenizer: str, start: tuple[int, int] = (0, 0)
) -> list[tuple[TextShard, Encoded]]:
    encoder = Encoder(Settings(tokenizer, "text", False))
    return [(shard, encoder(shard)) for shard in work.shards(*start)]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt", "e.txt.gz", "f.parquet", "g"]
)
@pytest.mark.parametrize("size", [100, 4000, 2**23])
def test_shards_hold_every_document_once(
    name: str, size: int, inputs: Any, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
):
    root, documents = inputs
    monkeypatch.setattr(plan, "SHARD", size)
    work = plan.make((str(root / name),), "text")
    shards = encoded(work, tokenizer_file)
    if size == 100:
        assert len(shards) > 5
    stream, lengths, pending = [], [], 0
    for shard, each in shards:
        stream += each.tokens.tolist()
        for i, length in enumerate(each.lengths.tolist()):
            pending += length
            if shard.ends or i < len(each.lengths) - 1:
                lengths.append(pending)
                pending = 0
    ids = load_tokenizer(tokenizer_file)
    wanted = [[*ids.encode_batch([document])[0].tolist(), ids.eod] for document in documents[name]]
    assert pending == 0
    assert lengths == [len(document) for document in wanted]
    assert stream == [i for document in wanted for i in document]
    assert sum(each.text_bytes for _, each in shards) == sum(
        len(document.encode()) for document in documents[name]
    )
    assert sum(shard.size for shard, _ in shards) == pytest.approx(work.size)
    for k in range(0, len(shards), 7):  # starting at any shard
        rest = list(work.shards(shards[k][0].unit, shards[k][0].chunk))
        assert rest == [shard for shard, _ in shards[k:]]


def test_a_line_longer_than_shards(
    tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
):
    """Covers shards in which no line starts, one of them at the end of the document."""
    monkeypatch.setattr(plan, "SHARD", 50)
    (tmp_path / "x.txt").write_text("a\n" + "b" * 500, encoding="utf-8")
    shards = encoded(plan.make((str(tmp_path / "x.txt"),), "text"), tokenizer_file)
    assert [each.lengths.tolist() for _, each in shards[1:]] == [[0]] * (len(shards) - 2) + [[1]]
    ids = load_tokenizer(tokenizer_file)
    stream = np.concatenate([each.tokens for _, each in shards])
    assert stream[-1] == ids.eod and ids.decode(stream[:-1]) == "a\n" + "b" * 500


def test_a_line_is_read_once(tmp_path: Path):
    """A long line is read once, not from every shard in it to its end."""
    (tmp_path / "x").write_bytes(b"a" * 10_000 + b"\nb\n")
    size = (tmp_path / "x").stat().st_size

    class Counted(io.FileIO):
        n = 0

        def readinto(self, into: Any) -> int:
            got = super().readinto(into)
            Counted.n += got
            return got

    found = []
    for start in range(0, size, 100):
        segment = plan.FileRange(
            str(tmp_path / "x"), "jsonl", start, min(start + 100, size), entire_file=False
        )
        with io.BufferedReader(Counted(str(tmp_path / "x")), 1) as file:
            found += worker._lines(file, segment)
    assert found == [(0, b"a" * 10_000 + b"\n"), (10_001, b"b\n")]
    assert Counted.n < 3 * size


def test_an_output_inside_the_inputs(
    tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
):
    """Files of a killed or a finished run for the same output are not read as input."""
    for name in ("a.txt", "mix.txt", "mix.more.txt"):
        (tmp_path / name).write_text(name * 20, encoding="utf-8")
    append = Appender.append

    def dies(self: Appender, shard: TextShard, encoded: Encoded) -> Totals:
        append(self, shard, encoded)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare(
                (str(tmp_path),),
                str(tmp_path / "mix"),
                tokenizer_file,
                workers=1,
                output=io.StringIO(),
            )
    assert (tmp_path / "mix.parts").exists()
    said = io.StringIO()
    facts = prepare((str(tmp_path),), str(tmp_path / "mix"), tokenizer_file, workers=1, output=said)
    assert [Path(each["path"]).name for each in facts["inputs"]] == [
        "a.txt",
        "mix.more.txt",
        "mix.txt",
    ]
    prepare((str(tmp_path),), str(tmp_path / "mix"), tokenizer_file, workers=1, output=said)
    assert "mix is already prepared from these inputs" in said.getvalue()


def files_of(prefix: Path) -> dict[str, bytes]:
    """Returns the contents of all files of a preparation."""
    return {
        str(path.relative_to(prefix.parent)): path.read_bytes()
        for path in sorted(prefix.parent.rglob("*"))
        if path.is_file()
    }


def test_what_is_written(
    inputs: Any, tmp_path: Path, tokenizer_file: str, capsys: pytest.CaptureFixture[str]
):
    root, documents = inputs
    names = ["g", "d.txt", "a.jsonl", "f.parquet"]
    prefix = tmp_path / "new" / "x"
    argv = [
        f"--output={prefix}",
        f"--tokenizer={tokenizer_file}",
        "--workers=1",
        "--input",
        *(str(root / name) for name in names),
    ]
    assert main(argv) == 0
    ids, found = load_tokenizer(tokenizer_file), Documents(prefix)
    wanted = [document for name in names for document in documents[name]]
    assert [ids.decode(found[i]) for i in range(len(found))] == [
        document + ids.decode([ids.eod]) for document in wanted
    ]
    facts = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
    assert facts.pop("identity") and facts.pop("versions").keys() == {"tokenizers"}
    listed = facts.pop("inputs")
    assert [entry["path"] for entry in listed[9:12]] == [
        str(root / "g" / name) for name in ("18.py", "late.dat", "sub/01.py")
    ]
    stat = (root / "a.jsonl").stat()
    assert {
        "path": str(root / "a.jsonl"),
        "bytes": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
    } in listed
    assert facts == {
        "tokenizer": {"fingerprint": ids.fingerprint, "spec": "tokenizer.json"},
        "tokenizer_fingerprint": ids.fingerprint, "eod": ids.eod,
        "vocab_size": ids.vocab_size, "documents": len(wanted), "tokens": len(found.tokens),
        "bytes": sum(len(document.encode()) for document in wanted), "lost_bytes": 0,
        "text_field": "text", "skipped_lines": 0, "skipped_files": 2,
    }  # fmt: skip
    assert load_tokenizer(f"{prefix}.tokenizer").fingerprint == ids.fingerprint
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "x.bin",
        "x.digests",
        "x.idx",
        "x.json",
        "x.tokenizer",
    ]
    out = capsys.readouterr().out
    assert f"{len(wanted)} documents" in out and "2 files that are not UTF-8 skipped" in out

    before = files_of(prefix)
    assert main(argv) == 0  # again: nothing to do
    assert "is already prepared" in capsys.readouterr().out
    assert files_of(prefix) == before
    with pytest.raises(
        ConfigError,
        match=(
            r"x\.json exists and was made from other inputs or settings; remove .*x\.bin, .*or "
            r"choose another"
        ),
    ):
        main([*argv, str(root / "b.jsonl.gz")])
    os.remove(f"{prefix}.json")
    with pytest.raises(
        ConfigError,
        match=(
            r"x\.bin exists and was not made by this command; remove it, or choose another "
            r"--output"
        ),
    ):
        main(argv)
    assert not Path(f"{prefix}.parts").exists()


def test_a_trained_tokenizer(inputs: Any, tmp_path: Path):
    root, documents = inputs
    facts = prepare(
        (str(root / "a.jsonl"),), str(tmp_path / "x"), "train:270", workers=1, output=io.StringIO()
    )
    trained = load_tokenizer(tmp_path / "x.tokenizer")
    assert (trained.vocab_size, facts["tokenizer"]["spec"]) == (270, "train:270")
    # all of the text, because there is little
    assert trained.fingerprint == train_tokenizer(documents["a.jsonl"], 270).fingerprint
    assert Documents(tmp_path / "x").tokens.dtype == np.uint16
    with pytest.raises(
        ConfigError,
        match=r"--tokenizer=train:256: expected train:N with a number of entries of at least 257",
    ):
        prepare((str(root / "a.jsonl"),), str(tmp_path / "y"), "train:256")


def test_other_inputs_are_not_mixed(
    tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100, encoding="utf-8")
    both = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))

    def dies(self: Appender, shard: TextShard, encoded: Encoded) -> Totals:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare(both, str(tmp_path / "x"), tokenizer_file, workers=1, output=io.StringIO())

    def refuses(
        message: str,
        inputs: tuple[str, ...] = both,
        tokenizer: str = tokenizer_file,
        **options: Any,
    ) -> None:
        ending = (
            r".* Give the original ones to continue, or remove .*x\.parts to start from scratch"
        )
        with pytest.raises(
            ConfigError,
            match=r"x\.parts was started with different inputs or settings: " + message + ending,
        ):
            prepare(inputs, str(tmp_path / "x"), tokenizer, workers=1, **options)

    refuses(r"tokenizer was [0-9a-f]{64}, now [0-9a-f]{64}; versions was", tokenizer="bytes")
    refuses("text_field was text, now body", text_field="body")
    refuses(r".*b\.txt is no longer among the inputs\.", inputs=both[:1])
    refuses("the inputs come in another order", inputs=both[::-1])
    (tmp_path / "c.txt").write_text("c", encoding="utf-8")
    refuses(r".*c\.txt was not among the inputs\.", inputs=(*both, str(tmp_path / "c.txt")))
    (tmp_path / "a.txt").write_text("a" * 101, encoding="utf-8")
    os.remove(tmp_path / "b.txt")
    refuses(r".*a\.txt has changed, and 1 more such\.", inputs=both[:1])
    with (
        Unfinished(str(tmp_path / "x")),
        pytest.raises(ConfigError, match=r"another process is writing .*x\.parts; wait for it"),
    ):
        prepare(both[:1], str(tmp_path / "x"), tokenizer_file)


def test_errors(tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch):
    def fails(
        path: Path | str, message: str, contents: bytes | None = None, **options: Any
    ) -> None:
        if contents is not None:
            Path(path).write_bytes(contents)
        with pytest.raises(ConfigError, match=message):
            prepare(
                (str(path),),
                str(tmp_path / "x"),
                tokenizer_file,
                workers=1,
                output=io.StringIO(),
                **options,
            )
        assert not [
            each
            for each in tmp_path.iterdir()
            if each.name in ("x.bin", "x.digests", "x.idx", "x.json")
        ]

    good = b'{"text": "a"}\n'
    fails(
        tmp_path / "no.txt",
        r"--input=.*no\.txt: no such input file or directory; give \.txt, \.jsonl",
    )
    fails(tmp_path / "a.txt", r"a\.txt is an empty file", b"")
    fails(tmp_path / "a.csv", r"a\.csv: files of type \.csv are not read; give \.txt", b"a")
    (tmp_path / "folder").mkdir()
    fails(tmp_path / "folder", "folder has no files, or only hidden or empty ones")
    fails(
        tmp_path / "b.txt",
        r"b\.txt is not UTF-8 \(byte 2\); convert it, or leave it out",
        b"ab\xff",
    )
    monkeypatch.setattr(plan, "SHARD", 100)
    bad = good * 30 + b"oops\n" + good * 30
    line_31 = r", line 31: expected a JSON object with a string \"text\", got b'oops"
    for name, contents in (("a.jsonl", bad), ("b.jsonl.gz", gzip.compress(bad))):
        Path(f"{tmp_path / 'x'}.parts").exists() and Unfinished(str(tmp_path / "x")).remove()
        fails(tmp_path / name, name + line_31, contents)
    Unfinished(str(tmp_path / "x")).remove()
    fails(
        tmp_path / "c.jsonl", "the inputs have no text: 1 files, 0 bad lines", b'\n{"text": ""}\n'
    )
    fails(
        tmp_path / "d.jsonl.zst",
        r"d\.jsonl\.zst is damaged or truncated",
        zstandard.compress(good * 99 + os.urandom(99))[:-9],
    )
    for output in ("", f"{tmp_path}/"):
        with pytest.raises(
            ConfigError,
            match=rf"--output={output}: expected a prefix of file names, such as .*books",
        ):
            prepare((str(tmp_path / "a.jsonl"),), output, tokenizer_file)
    with pytest.raises(
        ConfigError, match=r"--workers=-1 must be at least 1, or 0 for one per core"
    ):
        prepare((str(tmp_path / "a.jsonl"),), str(tmp_path / "x"), tokenizer_file, workers=-1)
    Unfinished(str(tmp_path / "x")).remove()
    facts = prepare(
        (str(tmp_path / "a.jsonl"),),
        str(tmp_path / "x"),
        tokenizer_file,
        workers=1,
        skip_bad_lines=True,
        output=io.StringIO(),
    )
    assert (facts["documents"], facts["skipped_lines"]) == (60, 1)


def test_command_line_mistakes(capsys: pytest.CaptureFixture[str]):
    result = subprocess.run(
        [sys.executable, "-m", "mesh_lm.data.prepare", "--inptu=x"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (1, "")
    head, *problems = result.stderr.splitlines()
    assert (
        head == "error: bad command line"
        and problems[0] == "  - --inptu: there is no such option; did you mean --input?"
    )
    assert [problem[:43] for problem in problems[1:]] == [
        "  - --input: missing; Files (.txt, .jsonl, ",
        "  - --output: missing; Prefix of the output",
        "  - --tokenizer: missing; A tokenizer.json,",
    ]


def test_progress_lines():
    out, now = io.StringIO(), iter([0.0, 5.0, 10.0, 10.0, 10.0, 99.0])
    display = Display(out, 4000, Totals(size=1000, bytes=10**6), clock=lambda: next(now))
    display.show(Totals(size=1500, bytes=2 * 10**6))
    display.show(Totals(size=2000, bytes=11 * 10**6, tokens=12345))
    assert out.getvalue() == " 50%  1.0 MB/s  12,345 tokens  eta 0:00:20\n"


def test_workers_import_no_jax():
    code = (
        "import mesh_lm.data.prepare.worker, sys; print([m for m in ('jax', 'flax', 'tyro', "
        "'rich', 'grain') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert result.stdout.strip() == "[]", result.stderr
