"""Time of each collective over each mesh axis and a range of sizes, with latency and bandwidth.

Writes a profile that `mesh-lm plan --hw=profile.json` takes. It runs on CPUs, with --devices, and
on GPUs; with several processes under `mesh-lm launch --per-node=2 benchmarks/comm.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from pathlib import Path

from record import Record, Row, options

from mesh_lm.config import TrainConfig
from mesh_lm.distributed import processes
from mesh_lm.errors import ConfigError
from mesh_lm.measure.collectives import COLLECTIVES, measured
from mesh_lm.model.decoder import DecoderConfig
from sharding_rules import MeshConfig, make_mesh
from sharding_rules.lab import LabError
from sharding_rules.lab.profile import Measured
from sharding_rules.mesh import AXES

_SMALLEST = 4 << 10
_LARGEST = 64 << 20
_QUICK_DEVICES = 4
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main(arguments: argparse.Namespace) -> int:
    sizes = _sizes(arguments)
    kinds = arguments.kinds.split(",") if arguments.kinds else list(COLLECTIVES)
    for kind in kinds:
        if kind not in COLLECTIVES:
            raise ConfigError(f"--kinds={kind}: expected some of {', '.join(COLLECTIVES)}")
    _start(arguments)

    import jax

    # JAX has its devices from here on.
    from mesh_lm.measure.chart import write_chart
    from mesh_lm.measure.profiles import profile_here, require_mergeable, save

    mesh = make_mesh(_mesh(arguments.mesh, jax.device_count(), jax.local_device_count()))
    if mesh.size < 2:
        raise ConfigError("one device sends nothing: give --devices=4, or more GPUs")
    file = arguments.profile or arguments.output / "profile.json"
    is_first = jax.process_index() == 0
    used_axes = {axis: int(n) for axis, n in mesh.shape.items() if n > 1}
    try:
        if is_first:
            require_mergeable(profile_here(), file)
        found = []
        for one in measured(
            *(mesh, sizes),
            kinds=kinds,
            seconds=0.005 if arguments.quick else arguments.seconds,
            samples=3 if arguments.quick else 5,
            say=processes.print_on_process0,
        ):
            processes.print_on_process0(_line(one))
            found.append(one)
        if not is_first:
            return 0
        profile = profile_here(collectives=tuple(found), mesh=used_axes)
        save(profile, file)
    except LabError as error:
        raise ConfigError(str(error)) from error

    record = Record(
        f"comm{'-quick' * arguments.quick}",
        arguments.output,
        device=profile.device,
        mesh=used_axes,
        processes=profile.n_processes,
    )
    record.table("Latency and bandwidth", [_row(one) for one in found], _NOTE)
    record.table("Times", list(_points(found)), show=False)
    chart = f"{record.stem}.png"
    record.data["charts"] = [chart]
    record.write()
    mesh_words = " x ".join(f"{axis} {n}" for axis, n in used_axes.items())
    write_chart(
        found, f"{profile.n_devices} x {profile.device}, {mesh_words}", record.directory / chart
    )
    print(f"wrote {file}")
    return 0


_NOTE = (
    "Time = latency + bytes / bandwidth, fitted to the medians. The bytes are those that a device "
    "sends in a ring. error: mean of |fitted / measured - 1|."
)


def _start(arguments: argparse.Namespace) -> None:
    """Starts JAX, and connects the processes that a launcher has started."""
    config = TrainConfig(DecoderConfig(), "bench_comm")
    devices = arguments.devices or (_QUICK_DEVICES if arguments.quick else 0)
    launch = dataclasses.replace(config.launch, cpu_devices=devices)
    config = dataclasses.replace(config, launch=launch)
    processes.start(config, {"bench": "comm", "mesh": arguments.mesh, "sizes": arguments.sizes})


def _mesh(text: str, n_devices: int, n_local: int) -> MeshConfig:
    """Returns the mesh that `data=2,tensor=4` describes; empty: data over the processes, tensor
    over the devices of each.
    """
    if not text:
        return MeshConfig(data=n_devices // n_local, tensor=n_local)
    sizes = {}
    for word in text.split(","):
        axis, _, n = word.partition("=")
        if axis not in AXES or not n.isdecimal() or int(n) < 1:
            raise ConfigError(f"--mesh={text}: expected sizes of mesh axes, as data=2,tensor=4")
        sizes[axis] = int(n)
    if math.prod(sizes.values()) != n_devices:
        raise ConfigError(f"--mesh={text}: there are {n_devices} devices")
    return MeshConfig(**sizes)


def _sizes(arguments: argparse.Namespace) -> list[int]:
    """Returns the bytes of --sizes; without it, each four times as large as the one before it."""
    if not arguments.sizes:
        largest = 256 << 10 if arguments.quick else _LARGEST
        n_sizes = math.floor(math.log(largest / _SMALLEST, 4)) + 1
        return [_SMALLEST * 4**i for i in range(n_sizes)]
    sizes = [_bytes(word) for word in arguments.sizes.split(",")]
    if len(set(sizes)) < 2:
        raise ConfigError(f"--sizes={arguments.sizes}: a fit needs at least two sizes")
    return sizes


def _bytes(word: str) -> int:
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", word)
    if not match or not int(match[1]):
        raise ConfigError(f"--sizes={word}: expected bytes, as 4096, 64KiB or 16MiB")
    return int(match[1]) * _UNITS[match[2]]


def _line(one: Measured) -> str:
    return (
        f"{one.kind} over {one.axis} ({one.group} devices, {one.nodes} nodes): "
        f"{one.fit.latency_us:.3g} µs + bytes / {one.fit.bytes_per_s / 1e9:.3g} GB/s, "
        f"error {one.fit.error:.0%}"
    )


def _row(one: Measured) -> Row:
    return {
        "axis": one.axis,
        "devices": one.group,
        "nodes": one.nodes,
        "collective": one.kind,
        "latency_us": one.fit.latency_us,
        "bandwidth_gb_per_s": one.fit.bytes_per_s / 1e9,
        "error": one.fit.error,
    }


def _points(found: list[Measured]) -> list[Row]:
    rows = []
    for one in found:
        for point in one.points:
            rows.append(
                {
                    "axis": one.axis,
                    "collective": one.kind,
                    "payload_bytes": point.payload,
                    "sent_bytes": point.wire,
                    "us": point.us,
                    "spread": point.spread,
                    "bus_gb_per_s": point.wire / point.us / 1e3,
                }
            )
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--profile", type=Path, help="the profile's .json (default: profile.json in --output)"
    )
    parser.add_argument("--devices", type=int, default=0, help="CPU devices of each process")
    parser.add_argument(
        "--mesh", default="", help="data=2,tensor=4 (default: data over processes, tensor inside)"
    )
    parser.add_argument(
        "--sizes", default="", help="of whole arrays: 64KiB,1MiB,16MiB (default: 4 KiB to 64 MiB)"
    )
    parser.add_argument("--kinds", default="", help="some collectives: all-reduce,all-gather")
    parser.add_argument("--seconds", type=float, default=0.05, help="that a sample lasts at least")
    return parser


if __name__ == "__main__":
    sys.exit(processes.run(main, _parser().parse_args()))
