"""Host memory and time to import Hugging Face weights onto eight CPU devices, and to export them.

CPU devices keep their arrays in host memory, so the arrays' own bytes are subtracted; the rest is
what the transfer needs in addition. Each case runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from record import ROOT, Record, Row, options

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import ml_dtypes
import numpy as np

from mesh_lm import huggingface
from mesh_lm.huggingface import files
from mesh_lm.huggingface.configs import to_json
from mesh_lm.huggingface.families import LLAMA
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout
from sharding_rules import MeshConfig, Shard, make_mesh, preset

MIB = 2**20
CASES = {
    "fsdp=4 x tensor=2": ("hsdp+megatron", {"fsdp": 4, "tensor": 2}),
    "data=2 x fsdp=4": ("hsdp", {"data": 2, "fsdp": 4}),
    "data=8": ("ddp", {"data": 8}),
}


def model(quick: bool) -> DecoderConfig:
    """A Llama of 0.5 B parameters, 1 GB in bf16."""
    size = {"n_layers": 2, "d_model": 128, "d_ff": 512, "vocab_size": 1000} if quick else {}
    full = {"n_layers": 12, "d_model": 1536, "d_ff": 6144, "vocab_size": 32_000, **size}
    return DecoderConfig(**full, n_heads=16, n_kv_heads=8, seq_len=64, positions="rotary", norm="rmsnorm", activation="swiglu",
                         biases=False, tied=False)  # fmt: skip


def synthesise(directory: Path, config: DecoderConfig) -> None:
    """Writes random weights in bf16, one file per layer, without holding the full model."""
    (directory / "config.json").write_text(
        json.dumps(to_json(config, "bfloat16")), encoding="utf-8"
    )
    sizes = {
        "D": config.d_model,
        "N": config.n_heads,
        "K": config.kv_heads,
        "H": config.d_head,
        "F": config.d_mlp,
        "V": config.vocab_size,
    }
    random, weight_map = np.random.default_rng(0), {}
    rows = [row for row in LLAMA.mappings if ".qkv." not in row.param]
    for i in range(-1, config.n_layers):
        chosen = [row for row in rows if ("L" in row.dims) == (i >= 0)]
        tensors = {
            name.format(i): random.standard_normal(row.shape(sizes), np.float32).astype(
                ml_dtypes.bfloat16
            )
            for row in chosen
            for name in row.hf_names
        }
        file = f"model-{i + 1}.safetensors"
        files.write(directory / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / files.INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


class Peak:
    """Samples this process's anonymous memory every 2 ms; it excludes pages of mapped files, which
    the system can drop."""

    def __enter__(self) -> Peak:
        self.baseline = self.top = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.top = max(self.top, anonymous())


def anonymous() -> int:
    return 1024 * int(
        re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]
    )  # type: ignore[index]


def settle() -> None:
    """Returns freed memory to the system, so that only memory in use is counted."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def on_devices(params: dict[str, jax.Array]) -> int:
    """Returns the bytes of the parameters on all devices, each buffer counted once: on a CPU
    replicas may share one."""
    return sum(
        {
            s.data.unsafe_buffer_pointer(): s.data.nbytes
            for x in params.values()
            for s in x.addressable_shards
        }.values()
    )


def case(name: str, directory: Path, quick: bool) -> Row:
    rules, mesh = CASES[name]
    layout = ModelLayout.of(model(quick), Shard(preset(rules), make_mesh(MeshConfig(**mesh))))
    read: list[int] = []
    original = files.StoredTensor.read
    files.StoredTensor.read = lambda self, part: (
        data := original(self, part),
        read.append(data.nbytes),
    )[0]  # type: ignore[method-assign]
    huggingface.config_of(directory)
    jax.block_until_ready(jax.device_put(np.zeros(8)))
    settle()
    with Peak() as load_peak:
        start_time = time.perf_counter()
        params = jax.block_until_ready(huggingface.load(directory, layout))
        seconds = time.perf_counter() - start_time
    array_bytes = on_devices(params)
    parts = [np.prod(x.sharding.shard_shape(x.shape)) * 4 for x in params.values()]
    settle()
    with tempfile.TemporaryDirectory(dir=directory) as output, Peak() as back:
        start_time = time.perf_counter()
        huggingface.save(Path(output) / "out", layout, params, max_shard_bytes=128 * MIB)
        seconds_back = time.perf_counter() - start_time
    return {
        "mesh": name, "import_s": seconds, "read_MiB": sum(read) / MIB,
        "arrays_MiB": array_bytes / MIB,
        "largest_part_MiB": float(max(parts)) / MIB,
        "import_beside_MiB": (load_peak.top - load_peak.baseline - array_bytes) / MIB,
        "export_s": seconds_back, "export_beside_MiB": (back.top - back.baseline) / MIB,
    }  # fmt: skip


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--case", nargs=2, help="measure one, on a directory (used by this program)"
    )
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(case(arguments.case[0], Path(arguments.case[1]), arguments.quick)))
        return 0
    record = Record(
        f"huggingface{'-quick' * arguments.quick}",
        arguments.output,
        device=jax.devices()[0].device_kind,
    )
    config, rows = model(arguments.quick), []
    with tempfile.TemporaryDirectory(prefix="huggingface-") as directory:
        synthesise(Path(directory), config)
        stored = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
        for name in CASES:
            words = [
                sys.executable,
                __file__,
                "--case",
                name,
                directory,
                *["--quick"] * arguments.quick,
            ]
            done: Any = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            note = (
                f"{config.n_params() / 1e6:,.0f} M parameters, {stored / MIB:,.0f} MiB of bf16 in "
                f"{config.n_layers + 1} files; fp32 on the "
            )
            note += (
                "devices. Beside: peak of anonymous memory, less what was held before and (import) "
                "the arrays. Export: files of 128 MiB."
            )
            record.table("Import and export", rows, note)
            record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
