"""Compares our reader of Megatron .bin/.idx files with Megatron-LM's: seconds to build the indices,
tokens delivered per second.

python benchmarks/megatron_data.py --megatron=/path/to/venv/bin/python

That venv: Python 3.11, `pip install torch==2.13.0 numpy packaging tqdm` and `pip install --no-deps
megatron-core==0.16.1`. Both read the same files in the same order, in turns, each in a process of
its own that prints its results as one line of JSON. Targets: at most twice Megatron's time for the
indices, at least twice the tokens per second of a torch DataLoader over its dataset, at its best
setting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, Record, Row, options

EOD, VOCAB, SEQ_LEN, SEED, SPLIT = 0, 50_000, 2048, 1234, "99,1,0"
INDEX_TARGET, LOADER_TARGET = 2.0, 2.0

MEGATRON = r"""
import json, sys, time, types, warnings
warnings.filterwarnings("ignore")
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

job = json.loads(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{job['cache']}.store", rank=0, world_size=1)

def build():
    config = GPTDatasetConfig(
        random_seed=job["seed"], sequence_length=job["seq_len"], blend=get_blend_from_list(job["blend"]), split=job["split"],
        path_to_cache=job["cache"], tokenizer=types.SimpleNamespace(eod=job["eod"], vocab_size=None, unique_identifiers={}),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [job["samples"], 0, 0], lambda: True, config).build()[0]

from megatron.core.datasets import helpers  # not part of the build
began = time.perf_counter()
dataset = build()
result = {"seconds": time.perf_counter() - began, "length": len(dataset), "torch": torch.__version__}
if "workers" in job:
    import megatron.core
    def rate(workers, batch):
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers, prefetch_factor=4 if workers else None)
        n, began = 0, None
        for i, item in enumerate(loader):
            n += batch * job["seq_len"] * (began is not None)
            if i == 4:
                began = time.perf_counter()
            elif began is not None and time.perf_counter() - began > job["time"]:
                break
        return n / (time.perf_counter() - began)
    result["rates"] = [[workers, batch, rate(workers, batch)] for workers in job["workers"] for batch in job["batches"]]
print("\n" + json.dumps(result))
"""


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--megatron", required=True, help="the Python of a venv with megatron-core and torch"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print("\n" + json.dumps(ours(json.loads(arguments.job))))
        return 0
    sizes = (
        {"documents": 2_000, "repeats": 1, "time": 0.3}
        if arguments.quick
        else {"documents": 1_000_000, "repeats": 5, "time": 4.0}
    )
    record = Record(
        f"megatron_data{'-quick' * arguments.quick}",
        arguments.output,
        megatron="megatron-core 0.16.1, its own helpers_cpp",
    )
    with tempfile.TemporaryDirectory(prefix="megatron-data-") as directory:
        corpora(Path(directory), sizes["documents"])
        record.table("Index build", list(indices(arguments, Path(directory), sizes)), INDEX_NOTE)
        record.write()
        record.table("Loader", list(loaders(arguments, Path(directory), sizes)), LOADER_NOTE)
        record.write()
    return 0


INDEX_NOTE = (
    "From opening the files to a dataset that can be read, its indices computed and saved: both "
    f"sides in a new process without a cache, by turns; medians. seq_len {SEQ_LEN}, split {SPLIT}, "
    f"about 400 tokens a document. Target: at most {INDEX_TARGET:g} times Megatron's."
)
LOADER_NOTE = (
    "Megatron: torch DataLoader over GPTDataset (no attention masks made), batches of tensors in "
    "memory. Ours: Loader, batches of 32 on the device, all fields. Best of two runs each. Target: "
    f"at least {LOADER_TARGET:g} times Megatron's best setting."
)


def corpora(directory: Path, n: int) -> None:
    """Makes files of n documents with 400 tokens on average, and of n / 5 with 2,000. Returns their
    prefixes."""
    sys.path.insert(0, str(ROOT))
    from mesh_lm.data.indexed import write_documents

    for name, count, mean in (("short", n, 400), ("long", n // 5, 2000)):
        random = np.random.default_rng(len(name))
        lengths = random.integers(1, 2 * mean, count)
        pool = random.integers(1, VOCAB, 4 * mean).astype(np.uint16)
        pool[-1] = EOD
        write_documents(directory / name, (pool[-length:] for length in lengths), vocab=VOCAB)


def indices(arguments: argparse.Namespace, directory: Path, sizes: dict[str, Any]):
    n, tokens = sizes["documents"], sizes["documents"] * 400
    cases = {
        "1 epoch": (["short"], 0.9),
        "5 epochs": (["short"], 4.6),
        "blend of 2, 1 epoch": (["0.6", "short", "0.4", "long"], 1.2),
    }
    for name, (blend, epochs) in cases.items():
        seconds: dict[str, list[float]] = {"megatron": [], "ours": []}
        for repeat in range(sizes["repeats"]):
            job = {
                "blend": [str(directory / word) if word.isalpha() else word for word in blend],
                "samples": max(64, int(epochs * 0.96 * tokens / SEQ_LEN)),
            }
            for side, side_seconds in seconds.items():
                result = measured(arguments, directory / f"{side}-{name}-{repeat}", job, side)
                side_seconds.append(result["seconds"])
        theirs, mine = (statistics.median(seconds[side]) for side in ("megatron", "ours"))
        yield {"build": name, "documents": n, "samples": job["samples"], "megatron_s": theirs, "ours_s": mine, "ratio": mine / theirs,
               "holds": mine <= INDEX_TARGET * theirs,
               "megatron_all_s": rounded(seconds["megatron"]),
               "ours_all_s": rounded(seconds["ours"]), "load": os.getloadavg()[0]}  # fmt: skip


def loaders(arguments: argparse.Namespace, directory: Path, sizes: dict[str, Any]):
    for name, mean in (("short", 400), ("long", 2000)):
        job = {
            "blend": [str(directory / name)],
            "samples": max(64, int(0.9 * sizes["documents"] * 400 / SEQ_LEN)),
            "time": sizes["time"] / 2,
        }
        jobs = {
            "megatron": {"workers": [0, 1, 2], "batches": [8, 32]},
            "ours": {"workers": [0, 1, 2], "batches": [32]},
        }
        best: dict[tuple[str, int, int], float] = {}
        for repeat in range(1 if arguments.quick else 2):
            for side, settings in jobs.items():
                result = measured(
                    arguments,
                    directory / f"loader-{side}-{name}-{repeat}",
                    {**job, **settings},
                    side,
                )
                for workers, batch, rate in result["rates"]:
                    best[side, workers, batch] = max(rate, best.get((side, workers, batch), 0.0))
        theirs = max(rate for (side, *_), rate in best.items() if side == "megatron")
        for (side, workers, batch), rate in best.items():
            row: Row = {
                "tokens_per_document": mean,
                "side": side,
                "workers_or_threads": workers,
                "batch": batch,
                "mtokens_per_s": rate / 1e6,
            }
            if side == "ours":
                row |= {"of_megatrons_best": rate / theirs, "holds": rate >= LOADER_TARGET * theirs}
            yield row | {"load": os.getloadavg()[0]}


def measured(
    arguments: argparse.Namespace, cache: Path, job: dict[str, Any], side: str
) -> dict[str, Any]:
    """Returns the JSON of a process's last line."""
    text = json.dumps(
        {**job, "cache": str(cache), "seed": SEED, "seq_len": SEQ_LEN, "split": SPLIT, "eod": EOD}
    )
    mine = [sys.executable, __file__, "--megatron", "-", "--job", text]
    run = subprocess.run(
        mine if side == "ours" else [arguments.megatron, "-c", MEGATRON, text],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if run.returncode:
        sys.exit(f"{side}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Measures the same with our code: `prepare` and `Batches`, as a run calls them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
    from mesh_lm.data.batches import Batches
    from mesh_lm.data.corpus import prepare
    from mesh_lm.model import DecoderConfig

    config = TrainConfig(
        model=DecoderConfig(vocab_size=VOCAB, seq_len=job["seq_len"]),
        output="unused",
        train=TrainLoop(steps=job["samples"] // 32, global_batch=32),
        data=DataConfig(blend=tuple(job["blend"]), split=job["split"], cache=job["cache"]),
        seed=job["seed"],
    )
    sharding = jax.NamedSharding(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), jax.P(None, "data")
    )
    start_time = time.perf_counter()
    batches = Batches(config, prepare(config.data, vocab=VOCAB), sharding)
    result: dict[str, Any] = {"seconds": time.perf_counter() - start_time}
    if "workers" in job:
        result["rates"] = [
            [threads, 32, loader_rate(batches, threads, job["time"])] for threads in job["workers"]
        ]
    return result


def loader_rate(batches: Any, threads: int, seconds: float) -> float:
    """Returns tokens per second on the device, without the first few batches."""
    import jax

    batches._batching["threads"] = threads
    with contextlib.closing(batches.train()) as loader:
        for _ in range(8):
            jax.block_until_ready(next(loader))
        n, start_time = 0, time.perf_counter()
        while time.perf_counter() - start_time < seconds:
            n += jax.block_until_ready(next(loader)[1])["tokens"].size
        return n / (time.perf_counter() - start_time)


def rounded(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
