"""MB of text per second that `mesh_lm.data.prepare` converts to .bin/.idx, compared with the
tokenizer alone and Megatron's inner loop.

All use one byte-level BPE on the same .jsonl. The baselines use one thread; `prepare` includes the
full command, from starting the workers to the finished files. CPU seconds (of all processes) do not
depend on the load of the machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import Record, Row, options

# before tokenizers are imported: the baselines use one thread
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import tokenizers

from mesh_lm.data import sources
from mesh_lm.data.indexed import Documents
from mesh_lm.data.prepare.run import prepare
from mesh_lm.data.tokenizer import train_tokenizer


def measured(method: str, workers: int, size: int, work: Callable[[], int]) -> Row:
    """Returns a row for `work`, which returns the number of tokens it made from `size` bytes of
    text."""
    old_usage = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    start_time = time.perf_counter()
    tokens = work()
    wall = time.perf_counter() - start_time
    new_usage = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    cpu = sum(
        b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime
        for a, b in zip(old_usage, new_usage, strict=True)
    )
    print(f"{method}, {workers} workers: {wall:.1f} s", flush=True)
    return {"method": method, "workers": workers, "mb_per_s": size / 1e6 / wall, "mb_per_cpu_s": size / 1e6 / cpu, "wall_s": wall,
            "cpu_s": cpu, "tokens": tokens}  # fmt: skip


def one_by_one(library: tokenizers.Tokenizer, path: Path, output: Path) -> int:
    """Does the same as Megatron's tools/preprocess_data.py with one worker: a line, its JSON, its
    ids as a list, an array, a write."""
    total = 0
    with open(path, encoding="utf-8") as lines, open(output, "wb") as file:
        for line in lines:
            ids = [*library.encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]
            file.write(np.array(ids, np.uint16).tobytes())
            total += len(ids)
    return total


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(f"prepare{'-quick' * arguments.quick}", arguments.output)
    texts = [document.text for document in sources.find("stdlib").documents()][
        : 20 if arguments.quick else None
    ]
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory(prefix="prepare-") as name, contextlib.chdir(name):
        path = Path("text.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        file = train_tokenizer(texts, 512 if arguments.quick else 8192).save(Path())
        library = tokenizers.Tokenizer.from_file(str(file))
        library.encode_special_tokens = True

        def batches() -> int:
            return sum(
                len(each.ids) + 1
                for i in range(0, len(texts), 64)
                for each in library.encode_batch_fast(texts[i : i + 64])
            )

        def prepared(workers: int) -> Callable[[], int]:
            def run() -> int:
                for old in Path().glob(f"x{workers}.*"):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
                return prepare(
                    (str(path),), f"x{workers}", str(file), workers=workers, output=io.StringIO()
                )["tokens"]

            return run

        methods = {
            ("tokenizer alone, encode_batch_fast", 1): batches,
            ("one document at a time, as Megatron", 1): lambda: one_by_one(
                library, path, Path("x0.bin")
            ),
            ("prepare", 1): prepared(1),
            ("prepare", 2): prepared(2),
        }
        rounds = [
            [measured(method, workers, size, work) for (method, workers), work in methods.items()]
            for _ in range(1 if arguments.quick else 3)
        ]
        rows = [min(same, key=lambda row: row["wall_s"]) for same in zip(*rounds, strict=True)]
        ids = np.fromfile("x0.bin", np.uint16)
        same = all(np.array_equal(Documents(f"x{n}").tokens, ids) for n in (1, 2))
    for row in rows:
        row["against_megatron"] = row["mb_per_s"] / rows[1]["mb_per_s"]
    facts = (
        f"{len(texts)} files of Python's standard library, {size / 1e6:.1f} MB; ids of all methods "
        f"equal: {'yes' if same else 'NO'}."
    )
    facts += f" The fastest of {len(rounds)} rounds, "
    record.table(
        "Text to .bin/.idx", rows, facts + "in each of which the methods ran one after another."
    )
    record.write()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
