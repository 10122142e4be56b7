"""Compiles training steps for absent H100s with and without optimizer.offload: memory of the device
and of its host, and the seconds of PCIe in a step.

Each GPU has one sequence in each of 16 microbatches, layers are scanned, and every layer is
recomputed. Nothing runs: times are predicted, and PCIe's speed is assumed. Rows that today's
results have already are not compiled again. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from record import Record, Row, options

TARGET = "h100"
MICROBATCHES = 16
GIB = 2**30
TITLE = "Memory of a GPU and of its host"
NOTE = (
    "peak: of one GPU. host: pinned memory for each GPU. copied: over PCIe in a step, both "
    "directions. Times are predicted, never measured; PCIe's speed is assumed. slow: at the "
    "sustained rates. within_host: copies from host memory to host memory."
)
MOMENTS = ("mu", "nu")
ALL = (*MOMENTS, "master")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A row."""

    config: str
    rules: str
    offload: tuple[str, ...]
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    replicas: int = 1
    seq_len: int = 0
    """0: that of the config."""

    @property
    def name(self) -> str:
        return f"{self.config} {self.rules} {','.join(self.offload) or 'none'}"

    @property
    def devices(self) -> int:
        n_devices = 1
        for size in self.mesh.values():
            n_devices *= size
        return n_devices


SUBJECTS = (
    Subject("gpt_1_3b", "ddp", ()),
    Subject("gpt_1_3b", "ddp", MOMENTS),
    Subject("gpt_1_3b", "distributed", ALL),
    Subject("llama3_8b", "ddp", ()),
    Subject("llama3_8b", "ddp", MOMENTS),
    Subject("llama3_8b", "distributed", ALL),
    Subject("llama3_8b", "fsdp", MOMENTS, {"fsdp": 8}, replicas=8),
    Subject("llama3_70b", "distributed+megatron_sp", (), {"tensor": 8}),
    Subject("llama3_70b", "distributed+megatron_sp", ALL, {"tensor": 8}),
    Subject("llama3_8b", "zero3", ALL),
    Subject("llama3_70b", "zero3", MOMENTS, {"data": 8}, replicas=8),
    Subject("llama3_70b", "zero3", ALL, {"data": 8}, replicas=8),
)


def prepared(subject: Subject, quick: bool) -> Any:
    """Returns the config of a row."""
    from mesh_lm.config import load
    from sharding_rules import MeshConfig, preset

    config = load(subject.config)
    sizes: dict[str, Any] = {"data": 1, **subject.mesh}
    model = {
        "remat": "full",
        "remat_layers": None,
        "unroll": False,
        "seq_len": subject.seq_len or config.model.seq_len,
    }
    if quick:
        model |= {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1024, "n_layers": 2}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        mesh=MeshConfig(**sizes),
        rules=preset(subject.rules),
        train=dataclasses.replace(
            config.train,
            global_batch=MICROBATCHES * subject.replicas,
            microbatches=MICROBATCHES,
        ),
        optimizer=dataclasses.replace(config.optimizer, offload=subject.offload),
        launch=dataclasses.replace(config.launch, compile_cache="", xla_flags="auto"),
    )


def measured(subject: Subject, quick: bool) -> Row:
    """Compiles it. `host_gib`: for each GPU. `copied_gib`: to and from the host in a step, of one
    GPU. `within_host`: copies from host memory to host memory.
    """
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab.flags import options as flags

    config = prepared(subject, quick)
    report = compile_config(config, TARGET, subject.devices, flags(flags_of(config, TARGET)))
    return {
        "name": subject.name,
        "config": subject.config,
        "rules": subject.rules,
        "gpus": subject.devices,
        "tokens": config.model.seq_len,
        "offload": ",".join(subject.offload) or "none",
        **memory_and_step(report),
        "host_temporaries_gib": report.memory.host.temporaries / GIB,
        "within_host": sum(copy.direction == "within host" for copy in report.host_copies),
        "copied_gib": report.host_copy_bytes / GIB,
        "pcie_s": report.timeline.host / 1e6,
        "pcie_slow_s": report.sustained.host / 1e6,
        "exposed_s": report.timeline.host_exposed / 1e6,
        "seconds": report.compile_seconds,
    }


def memory_and_step(report: Any) -> Row:
    """Returns the memory of a GPU and of its host, in GiB, and both ends of the step, in seconds."""
    return {
        "peak_gib": report.peak_bytes / GIB,
        "usable_gib": report.hbm / GIB,
        "fits": report.fits,
        "host_gib": report.host_bytes / GIB,
        "step_s": report.timeline.step / 1e6,
        "step_slow_s": report.sustained.step / 1e6,
    }


def main() -> int:
    parser = options(__doc__ or "", quick_help="the first two rows, with small models")
    parser.add_argument(
        "--only", default="", help="compile only rows whose name contains this text"
    )
    parser.add_argument(
        "--again", action="store_true", help="also compile rows that today's results already have"
    )
    args = parser.parse_args()
    record = Record(
        f"offload{'-quick' * args.quick}", args.output, kind=f"h100 jax {jax.__version__}"
    )
    tables = {} if args.again else record.earlier()
    done = {row["name"]: row for row in tables.get(TITLE, [])}
    for subject in SUBJECTS[:2] if args.quick else SUBJECTS:
        if subject.name in done or args.only not in subject.name:
            continue
        done[subject.name] = measured(subject, args.quick)
        rows = [done[one.name] for one in SUBJECTS if one.name in done]
        record.table(TITLE, rows, NOTE, show=False)
        record.write()
        print(done[subject.name], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
