"""One mesh for every strategy, with its axes ordered from the slowest network to the fastest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("island", "pipeline", "data", "fsdp", "expert", "sequence", "tensor")
"""Outermost to innermost: neighbours along the last axis are neighbours in a node, inside the
NVLink domain."""

ISLAND = "island"
"""The slowest axis: between two outer steps of an optimizer (DiLoCo) nothing is sent over it."""

MANUAL = frozenset({ISLAND, "pipeline", "data", "sequence", "expert"})
"""The axes that a training step is manual over; rules may declare more (`Rules.manual_axes`)."""


class MeshError(ValueError):
    """Mesh sizes that do not fit the devices.

    Attributes:
      problem: what is wrong, without what would fit. choices: meshes that differ in the size of one
      axis and would fit, as (axis, mesh), the nearest sizes of an axis first.
    """

    def __init__(self, problem: str, choices: Sequence[tuple[str, MeshConfig]] = ()) -> None:
        super().__init__(problem + would_fit(choices))
        self.problem, self.choices = problem, tuple(choices)


def would_fit(choices: Sequence[tuple[str, MeshConfig]]) -> str:
    """Returns the end of a message that names up to two sizes of each axis; empty without
    choices.
    """
    named: dict[str, list[str]] = {}
    for axis, mesh in choices:
        named.setdefault(axis, []).append(setting(axis, mesh.sizes()[axis]))
    texts = [text for texts in named.values() for text in texts[:2]]
    return f"; {' or '.join(texts)} would fit" if texts else ""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis. One axis may be -1: the devices that are left."""

    island: int = 1
    """Replicas that train apart, and average their weights every optimizer.outer_steps steps
    (DiLoCo); between datacentres, say."""
    pipeline: int = 1
    """Pipeline stages, which hold different layers."""
    data: int = 1
    """Data-parallel replicas, which see different sequences and sum their gradients once per
    step."""
    fsdp: int = 1
    """Data-parallel replicas across which weights are sharded; they are all-gathered layer by
    layer."""
    expert: int = 1
    """Groups of devices that hold different experts."""
    sequence: int = 1
    """Shards of each sequence (context parallelism)."""
    tensor: int = 1
    """Shards of each matmul (tensor parallelism); keep them inside a node."""
    extra: tuple[str, ...] = dataclasses.field(default=(), metadata={"expert": True})
    """Sizes of further mesh axes that the rules declare, innermost of all: tensor_y=2, or several
    separated by commas."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for word in self.extra:
            axis, _, size = word.partition("=")
            if not (axis.isidentifier() and size.removeprefix("-").isdecimal()):
                raise MeshError(
                    f"mesh.extra={word!r} is not an axis and its size, as in tensor_y=2"
                )
            if axis in AXES or axis in seen:
                fix = f"set mesh.{word}" if axis in AXES else "give it one size"
                raise MeshError(
                    f"mesh.extra={word!r}: the mesh has an axis {axis!r} already; {fix}"
                )
            seen.add(axis)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> MeshConfig:
        """A config from sizes by name, as `sizes` returns them."""
        extra = tuple(f"{axis}={size}" for axis, size in sizes.items() if axis not in AXES)
        return cls(**{axis: size for axis, size in sizes.items() if axis in AXES}, extra=extra)

    def sizes(self) -> dict[str, int]:
        """The size of each axis by name, outermost first."""
        words = (word.partition("=") for word in self.extra)
        return {axis: getattr(self, axis) for axis in AXES} | {
            axis: int(size) for axis, _, size in words
        }

    def __str__(self) -> str:
        return (
            " x ".join(f"{axis}={size}" for axis, size in self.sizes().items() if size != 1)
            or "1 device"
        )

    def resolve(self, n_devices: int) -> MeshConfig:
        """The same mesh with -1 replaced. Raises MeshError, with the nearest sizes that would work,
        if it does not fit n_devices.
        """
        sizes = self.sizes()
        if wrong := [
            setting(axis, size) for axis, size in sizes.items() if size < 1 and size != -1
        ]:
            raise MeshError(
                f"{', '.join(wrong)}: sizes are 1 or more, or -1 on one axis for whatever is left"
            )
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            fix = (
                f"set {' or '.join(setting(axis, 1) for axis in free)}"
                if len(free) == 2
                else "give each of the others a size"
            )
            raise MeshError(f"only one mesh axis can be -1, not {' and '.join(free)}; {fix}")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free and n_devices % fixed == 0:
            return MeshConfig.of(sizes | {free[0]: n_devices // fixed})
        if fixed == n_devices and not free:
            return self
        choices = self._choices(n_devices)
        visible = f"{n_devices} {'is' if n_devices == 1 else 'are'} visible"
        raise MeshError(
            f"mesh has {fixed}{' x ?' if free else ''} devices ({self}) but {visible}", choices
        )

    def _choices(self, n_devices: int) -> list[tuple[str, MeshConfig]]:
        """Returns the meshes that differ in one axis and fit: one size of it, or several where
        another axis takes what is left.
        """
        sizes = self.sizes()
        choices: list[tuple[str, MeshConfig]] = []
        is_open = -1 in sizes.values()
        for axis, size in sizes.items():
            others = math.prod(s for a, s in sizes.items() if a != axis and s != -1)
            if size == -1 or n_devices % others or (size == 1 and math.prod(sizes.values()) != 1):
                continue
            left = n_devices // others
            fits = [d for d in range(1, left + 1) if left % d == 0] if is_open else [left]
            choices += [
                (axis, MeshConfig.of(sizes | {axis: d}))
                for d in sorted(fits, key=lambda d: abs(d - size))
            ]
        return choices


def setting(axis: str, size: int) -> str:
    """The size of a mesh axis as a config spells it."""
    return f"mesh.{axis}={size}" if axis in AXES else f"mesh.extra={axis}={size}"


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (jax.Device; default: all). Raises MeshError unless `config` uses all
    of them.

    Devices are ordered by node (slice, then process, then id), so that the innermost axes stay
    inside a node. All axes are `AxisType.Auto`: XLA propagates shardings and inserts the
    collectives.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = config.resolve(len(devices)).sizes()
    devices.sort(key=lambda device: (*node_of(device), device.id))
    return Mesh(
        np.array(devices).reshape(tuple(shape.values())),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
    )


def node_of(device: Any) -> tuple[int, int]:
    """The node of a jax.Device, as (slice, process): there is one process per node."""
    return (getattr(device, "slice_index", None) or 0, device.process_index)
