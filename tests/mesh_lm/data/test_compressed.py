"""Small compressed files that are large otherwise: one clear error before they fill the memory."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_lm.data import compression, sources
from mesh_lm.errors import ConfigError


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor(19).compress(data)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_that_grows_beyond_what_text_does(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], kind: str
) -> None:
    path = tmp_path / f"a.{kind}.{suffix}"
    path.write_bytes(compress(bytes(compression._PLAUSIBLE + 2 * compression._BUFFER)))
    assert path.stat().st_size < 100_000
    with pytest.raises(
        ConfigError,
        match=r"a\..* decompresses to more than 200 times its size, which no text does; leave it out",
    ):
        list(sources.find(str(path)).documents())


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_a_file_that_repeats_itself_is_read(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    text = b"the same line\n" * 100_000
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(compress(text))
    assert (
        "".join(document.text for document in sources.find(str(path)).documents()).encode() == text
    )


def test_what_does_not_fit_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text", encoding="utf-8")
    with (
        pytest.raises(
            ConfigError, match="has a document or a line that does not fit into memory; split it"
        ),
        compression.opened(path),
    ):
        raise MemoryError
