"""What it costs the loader to verify prepared tokens: its CPU time with digests and without,
alternating.

Two epochs are read in one shuffled order from files in memory (the page cache). Each block is
compared once, when it is first read: most of them at the beginning of the first epoch, none in the
second. Target: 2 % of an epoch. The first samples cost more, because each of them touches blocks of
its own; that row gives the seconds. Also: how fast candidates for the digest are here, and what
sealing and verifying whole files takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import xxhash
from record import Record, Row, options

from mesh_lm.data.digests import BLOCK_BITS, digests_path
from mesh_lm.data.gpt_dataset import GPTDataset, samples_in
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, TokenStream, bin_path, seal, write_documents
from mesh_lm.data.loader import Loader
from mesh_lm.data.rows import RowReader

TARGET = 0.02
CASES = {  # name: vocabulary, tokens of a document, seq_len, sequences in a batch
    "2,048 tokens of 2 bytes": (50_000, 400, 2048, 32),
    "4,096 tokens of 4 bytes": (128_000, 400, 4096, 32),
    "gpt_tiny: 256 tokens of 2 bytes": (4096, 400, 256, 16),
}
PHASES = {"first 2 % of epoch 1": (0, 0.02), "epoch 1": (0, 1), "epoch 2": (1, 2)}


def write(prefix: Path, vocab: int, length: int, n_tokens: int) -> None:
    chance = np.random.default_rng(0)
    pool = chance.integers(1, vocab, 4 * length)
    write_documents(
        prefix,
        (pool[-int(n) :] for n in chance.integers(1, 2 * length, n_tokens // length)),
        vocab=vocab,
    )


def seconds(prefix: Path, cache: Path, seq_len: int, batch: int) -> dict[str, float]:
    """Returns the CPU seconds of the loader in each phase, digests verified if the prefix has
    them."""
    documents = Documents(prefix)
    n = samples_in(len(documents.unverified), seq_len)
    # One order of one epoch, read twice: a second epoch of its own would touch the same blocks.
    order = GPTDataset(
        TokenStream(documents),
        seq_len,
        n_samples=n,
        seed=1,
        cache=IndexCache(str(cache)),
        fingerprint=prefix.name,
    )
    sharding = jax.NamedSharding(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), jax.P(None, "data")
    )
    rows, cpu_seconds = RowReader(order, eod=0), []
    with contextlib.closing(
        Loader(rows, global_batch=batch, microbatches=1, sharding=sharding, position=0, threads=0, prefetch=2)
    ) as batches:  # fmt: skip
        for _ in range(2 * n // batch):
            start_time = time.process_time()
            jax.block_until_ready(next(batches))
            cpu_seconds.append(time.process_time() - start_time)
    return {
        name: sum(cpu_seconds[int(a * n / batch) : max(1, int(b * n / batch))])
        for name, (a, b) in PHASES.items()
    }


def loader(directory: Path, n_bytes: int, repeats: int) -> list[Row]:
    out = []
    for number, (name, (vocab, length, seq_len, batch)) in enumerate(CASES.items()):
        prefix = directory / f"sealed{number}"
        size = n_bytes if seq_len > 1000 else n_bytes // 4  # small batches take long
        write(prefix, vocab, length, size // (2 if vocab < 65_000 else 4))
        bare, pairs = directory / f"bare{number}", []
        for path in (bin_path(prefix), bin_path(prefix).with_suffix(".idx")):
            bare.with_suffix(path.suffix).hardlink_to(path)
        assert [Documents(each).is_sealed for each in (bare, prefix)] == [False, True]
        for turn in range(repeats):  # take turns in being first: the second finds warmer caches
            cpu_seconds = {
                each: seconds(each, directory, seq_len, batch)
                for each in ((bare, prefix), (prefix, bare))[turn % 2]
            }
            pairs.append([cpu_seconds[bare], cpu_seconds[prefix]])
        for phase in PHASES:
            without, verified = (
                statistics.median(pair[i][phase] for pair in pairs) for i in (0, 1)
            )
            cost = (
                statistics.median(
                    verified_seconds[phase] / bare_seconds[phase]
                    for bare_seconds, verified_seconds in pairs
                )
                - 1
            )
            out.append({
                "samples": name, "phase": phase, "without_s": without, "verified_s": verified,
                "cost_percent": 100 * cost,
                "holds": None if "%" in phase else cost <= TARGET,
            })  # fmt: skip
    return out


def digests(n_bytes: int) -> list[Row]:
    kinds: dict[str, Callable[[memoryview], object]] = {
        "XXH3-64": xxhash.xxh3_64_intdigest, "CRC-32 (zlib)": zlib.crc32,
        "SHA-256 (OpenSSL)": lambda part: hashlib.sha256(part).digest(),
        "BLAKE2b": lambda part: hashlib.blake2b(part, digest_size=8).digest(),
    }  # fmt: skip
    data, block, out = memoryview(os.urandom(n_bytes)), 1 << BLOCK_BITS, []
    for name, digest in kinds.items():
        cpu_seconds = []
        for _ in range(5):
            start_time = time.process_time()
            for i in range(0, n_bytes, block):
                digest(data[i : i + block])
            cpu_seconds.append(time.process_time() - start_time)
        out.append({"digest": name, "gb_per_s": n_bytes / min(cpu_seconds) / 1e9})
    return out


def whole(prefix: Path) -> list[Row]:
    size, out = bin_path(prefix).stat().st_size, []
    digests_path(prefix).unlink()
    for action in ("seal", "verify all"):
        start_time = time.process_time()
        seal(str(prefix))
        cpu_seconds = time.process_time() - start_time
        out.append(
            {
                "what": action,
                "gb": size / 1e9,
                "cpu_seconds": cpu_seconds,
                "gb_per_s": size / cpu_seconds / 1e9,
            }
        )
    out.append(
        {
            "what": "size of the side file",
            "gb": digests_path(prefix).stat().st_size / 1e9,
            "cpu_seconds": None,
            "gb_per_s": None,
        }
    )
    return out


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    n_bytes, repeats = (2**22, 1) if arguments.quick else (2**26, 30)
    record = Record(f"verified_data{'-quick' * arguments.quick}", arguments.output)
    with tempfile.TemporaryDirectory(prefix="verified-data-") as directory:
        rows = loader(Path(directory), n_bytes, repeats)
        note = (
            f".bin files of {n_bytes >> 20} MiB (gpt_tiny: a quarter), about 400 tokens a "
            f"document. Medians of {repeats}, 1 thread."
        )
        record.table("Loader", rows, note)
        record.table(
            "Digests",
            digests(min(n_bytes, 2**26)),
            f"Blocks of {1 << BLOCK_BITS:,} bytes; the best of five.",
        )
        record.table("Whole files", whole(Path(directory) / "sealed0"), "In the page cache.")
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
