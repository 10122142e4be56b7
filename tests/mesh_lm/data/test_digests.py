"""Prepared tokens are verified when they are first read."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from mesh_lm.commands.main import run
from mesh_lm.data import digests
from mesh_lm.data.digests import digests_path
from mesh_lm.data.gpt_dataset import GPTDataset
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, TokenStream, bin_path, idx_path, write_documents
from mesh_lm.data.packing import PackedSequences
from mesh_lm.data.sequences import Sequences
from mesh_lm.errors import ConfigError

SEQ = 512
VOCAB = 1000
EOD = 0
BLOCK = 1 << digests.BLOCK_BITS


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a sealed prefix of 9 blocks, the last of which is not full."""
    prefix = tmp_path_factory.mktemp("digests") / "x"
    chance = np.random.default_rng(0)
    lengths = chance.multinomial(8 * BLOCK // 2 + 1234, np.ones(300) / 300)
    write_documents(
        prefix, (np.append(chance.integers(1, VOCAB, n), EOD) for n in lengths), vocab=VOCAB
    )
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir()}


@pytest.fixture
def prefix(pristine: dict[str, bytes], tmp_path: Path) -> Path:
    for name, content in pristine.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path / "x"


def orders(prefix: Path, cache: Path, cure: str = ""):
    """Everything that reads tokens."""
    documents = Documents(prefix, cure=cure)
    text = TokenStream(documents)
    common = {"cache": IndexCache(str(cache)), "fingerprint": documents.fingerprint(), "seed": 3}
    yield Sequences(text, SEQ, eod=EOD, seed=3, pad=True)
    yield GPTDataset(text, SEQ, n_samples=1, **common)
    yield PackedSequences(text, SEQ, eod=EOD, **common)


def tokens_of(order) -> bytes:
    return order.read(np.arange(len(order))).labels.tobytes()


def flipped(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("number", range(3), ids=["sequences", "gpt", "packed"])
def test_a_damaged_block_is_refused_when_it_is_first_read(
    prefix: Path, tmp_path: Path, number: int
):
    intact = tokens_of([*orders(prefix, tmp_path)][number])
    flipped(bin_path(prefix), 5 * BLOCK + 77)
    order = [*orders(prefix, tmp_path)][number]
    empty = order.read(np.arange(0))
    blocks = set()
    refused = 0
    assert not len(empty.labels)
    for i in range(len(order)):
        try:
            order.read(np.array([i]))
        except ConfigError as error:
            refused += 1
            blocks.add(str(error))
    assert 0 < refused < len(order), "what touches other blocks is read"
    (message,) = blocks
    assert message.startswith(
        f"{prefix}.bin is damaged: bytes {5 * BLOCK:,} to {6 * BLOCK - 1:,} are not as they were "
        f"when {prefix}.dig"
    )
    assert (
        f"remove {prefix}.bin, .idx, .json and .digests and prepare the text again" in message
        and "prepare seal" in message
    )
    flipped(bin_path(prefix), 5 * BLOCK + 77)
    assert tokens_of([*orders(prefix, tmp_path)][number]) == intact


def test_a_block_is_compared_once(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compared: list[int] = []
    compare = digests.Blocks._compare
    monkeypatch.setattr(
        digests.Blocks,
        "_compare",
        lambda self, blocks: (compared.extend(blocks), compare(self, blocks)),
    )
    documents = Documents(prefix)
    order = GPTDataset(
        TokenStream(documents),
        SEQ,
        n_samples=1,
        cache=IndexCache(str(tmp_path)),
        fingerprint="",
        seed=3,
    )
    order.read(np.array([0]))
    assert 1 <= len(compared) <= 4, "one sample touches a few blocks"
    threads = [
        threading.Thread(target=lambda: [order.read(np.array([i])) for i in range(len(order))])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert documents.tokens.any() and documents._blocks is not None and documents._blocks.complete
    n_compared = len(compared)
    assert {*compared} == {*range(9)}
    assert 9 <= n_compared <= 4 * 9, "threads that meet at a block may both compare it"
    tokens_of(order)
    assert len(compared) == n_compared


def test_ranges_of_any_length_verify_the_blocks_that_they_touch(tmp_path: Path):
    """Blocks of 8 bytes, more of them than `require_all` takes at once."""
    block = 8
    n = 5000
    data = np.random.default_rng(0).integers(0, 256, block * n - 3, np.uint8)
    table = np.array(
        [xxhash.xxh3_64_intdigest(data[i : i + block].data) for i in range(0, len(data), block)],
        np.uint64,
    )
    sealed = digests.Digests(tmp_path, block, len(data), "", None, "", table, "")

    def blocks(data: np.ndarray) -> digests.Blocks:
        return digests.Blocks(tmp_path / "x.bin", data, sealed, "")

    chance = np.random.default_rng(1)
    for longest in (0, 1, block, block + 1, 2 * block, 50 * block):
        starts = chance.integers(0, len(data) + 1, 20)
        stops = np.minimum(starts + chance.integers(0, longest + 1, 20), len(data))
        read = blocks(data)
        read.require(starts, stops)
        touched = {
            i // block
            for start, stop in zip(starts, stops, strict=True)
            for i in range(start, stop)
        }
        assert touched <= {*np.flatnonzero(read._is_verified).tolist()}
        assert read._n_unverified == n - read._is_verified[:-1].sum() and not read.complete
    verified = blocks(data)
    verified.require_all()
    assert verified.complete and verified._is_verified.all()
    for position in (0, 4096 * block, len(data) - 1):
        damaged = data.copy()
        damaged[position] ^= 1
        with pytest.raises(
            ConfigError, match=f"x.bin is damaged: bytes {position // block * block:,} to "
        ):
            blocks(damaged).require_all()


def test_each_random_corruption_is_refused(pristine: dict[str, bytes], tmp_path: Path):
    """A few dozen; F19 has hundreds."""
    intact = tokens_of(next(_written(pristine, tmp_path / "intact")))
    for seed in range(45):
        chance = random.Random(seed)
        damaged = {name: bytearray(content) for name, content in pristine.items()}
        name = chance.choice(["x.bin", "x.idx", "x.digests"])
        content = damaged[name]
        position = chance.randrange(len(content))
        damage = seed % 3
        if damage == 0:
            content[position] ^= 1 << chance.randrange(8)
        elif damage == 1:
            content[position : position + 512] = chance.randbytes(
                len(content[position : position + 512])
            )
        else:
            del content[position:]
        with pytest.raises(ConfigError, match=rf"{name} is (damaged|truncated)"):
            assert tokens_of(next(_written(damaged, tmp_path / str(seed)))) == intact, "silent"


def _written(files: dict[str, bytes], directory: Path):
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return orders(directory / "x", directory)


def test_without_digests_all_is_read_and_a_seal_can_be_written(prefix: Path):
    sealed = digests_path(prefix).read_bytes()
    digests_path(prefix).unlink()
    documents = Documents(prefix)
    assert not documents.is_sealed and len(documents.tokens)
    documents.seal()
    assert digests_path(prefix).read_bytes() == sealed and Documents(prefix).is_sealed


def test_the_identity_is_that_of_all_tokens_and_survives_damage(prefix: Path):
    sealed = Documents(prefix).fingerprint()
    sampled = sealed.partition("-")[0]
    flipped(bin_path(prefix), 3)
    assert Documents(prefix).fingerprint() == sealed, (
        "damage is refused when it is read, not taken for other data"
    )
    flipped(bin_path(prefix), 3)
    digests_path(prefix).unlink()
    assert Documents(prefix).fingerprint() == sampled


def test_swapped_blocks_and_files_of_another_prefix(prefix: Path, tmp_path: Path):
    content = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes(
        content[BLOCK : 2 * BLOCK] + content[:BLOCK] + content[2 * BLOCK :]
    )
    with pytest.raises(ConfigError, match=r"x\.bin is damaged: bytes 0 to"):
        assert Documents(prefix).tokens.any()
    write_documents(tmp_path / "y", [np.arange(1, 900)], vocab=VOCAB)
    digests_path(prefix).write_bytes(digests_path(tmp_path / "y").read_bytes())
    with pytest.raises(
        ConfigError, match=r"x\.idx is damaged: it is not as it was when .*x\.digests was written"
    ):
        Documents(prefix)
    idx_path(prefix).write_bytes(idx_path(tmp_path / "y").read_bytes())
    with pytest.raises(
        ConfigError, match=r"x\.bin is damaged: its size is \d+ bytes, not the 1798 of"
    ):
        Documents(prefix)


def test_the_command_seals_and_verifies(prefix: Path, capsys: pytest.CaptureFixture[str]):
    sealed = digests_path(prefix).read_bytes()
    digests_path(prefix).unlink()
    for word in ("sealed", "intact"):
        assert run("prepare", ["seal", str(prefix)]) == 0
        assert capsys.readouterr().out == f"{prefix}: {word} (300 documents, 132,606 tokens)\n"
    assert digests_path(prefix).read_bytes() == sealed
    flipped(bin_path(prefix), 2 * BLOCK)
    assert run("prepare", ["seal", str(prefix)]) == 1
    assert f"error: {prefix}.bin is damaged: bytes 65,536 to 98,303" in capsys.readouterr().err
    assert digests_path(prefix).read_bytes() == sealed, "damage is never sealed"
    assert (
        run("prepare", ["seal", str(prefix) + "-missing"]) == 1
        and "cannot read" in capsys.readouterr().err
    )
