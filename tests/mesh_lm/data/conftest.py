"""Fixtures: some text in every kind of file that `mesh_lm.data.prepare` reads, and a tokenizer for
it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mesh_lm.data.tokenizer import train_tokenizer

RANDOM = np.random.default_rng(0)
WORDS = ["the", "cat", "naïve", "日本", "def", "return", "x1", "sat,"]


def text(n: int) -> str:
    # a split before a word changes no token
    return "".join("so " + " ".join(RANDOM.choice(WORDS, 8)) + "\n" for _ in range(n))


TEXTS = [text(int(n)) for n in RANDOM.integers(1, 12, 60)]
LINES = "".join(
    json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) + "\n" * (1 + i % 3)
    for i, text in enumerate(TEXTS)
).encode()
LONG = text(200)


def write_inputs(root: Path) -> dict[str, list[str]]:
    """Maps a file of each kind to its documents."""
    root.mkdir()
    (root / "a.jsonl").write_bytes(LINES)
    (root / "b.jsonl.gz").write_bytes(gzip.compress(LINES, mtime=0))
    (root / "c.jsonl.zst").write_bytes(
        zstandard.compress(LINES[:3000]) + zstandard.compress(LINES[3000:])
    )
    (root / "d.txt").write_text(LONG, encoding="utf-8")
    (root / "e.txt.gz").write_bytes(gzip.compress(LONG.encode(), mtime=0))
    table = pyarrow.table({"n": range(60), "text": [*TEXTS[:-1], None]})
    pyarrow.parquet.write_table(
        table, root / "f.parquet", row_group_size=25, use_dictionary=False, compression="none"
    )
    (root / "g" / "sub").mkdir(parents=True)
    for i, each in enumerate(TEXTS[:20]):
        (root / "g" / ("sub" if i % 2 else ".") / f"{i:02}.py").write_text(each, encoding="utf-8")
    (root / "g" / "binary.txt~").write_bytes(b"\xff\x00")
    (root / "g" / "late.dat").write_bytes(b"x" * 5000 + b"\xff")
    (root / "g" / "empty.txt").touch()
    (root / "g" / ".hidden.txt").write_text("secret", encoding="utf-8")
    folder = [TEXTS[i] for i in range(0, 20, 2)] + [TEXTS[i] for i in range(1, 20, 2)]
    return {"a.jsonl": TEXTS, "b.jsonl.gz": TEXTS, "c.jsonl.zst": TEXTS, "d.txt": [LONG], "e.txt.gz": [LONG], "f.parquet": TEXTS[:-1],
            "g": folder}  # fmt: skip


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    root = tmp_path_factory.mktemp("inputs") / "text"
    return root, write_inputs(root)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    return str(train_tokenizer(TEXTS, 300).save(directory))
