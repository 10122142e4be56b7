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
      problem: the message without what would fit.
      choices: meshes that differ in the size of one axis and would fit, as (axis, mesh), the
        nearest sizes of an axis first.
    """

    def __init__(self, problem: str, choices: Sequence[tuple[str, MeshConfig]] = ()) -> None:
        super().__init__(problem + would_fit(choices))
        self.problem = problem
        self.choices = tuple(choices)


def would_fit(choices: Sequence[tuple[str, MeshConfig]]) -> str:
    """Returns the end of a message, with up to two sizes of each axis; empty without choices."""
    settings_by_axis: dict[str, list[str]] = {}
    for axis, mesh in choices:
        settings_by_axis.setdefault(axis, []).append(setting(axis, mesh.sizes()[axis]))
    settings = []
    for axis_settings in settings_by_axis.values():
        settings += axis_settings[:2]
    return f"; {' or '.join(settings)} would fit" if settings else ""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis. One axis may be -1: the devices that are left."""

    island: int = 1
    """Replicas that train apart, and average their weights every diloco.outer_steps steps
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
        extra_axes: set[str] = set()
        for word in self.extra:
            axis, _, size = word.partition("=")
            if not (axis.isidentifier() and size.removeprefix("-").isdecimal()):
                raise MeshError(
                    f"mesh.extra={word!r} is not an axis and its size, as in tensor_y=2"
                )
            if axis in AXES or axis in extra_axes:
                fix = f"set mesh.{word}" if axis in AXES else "give it one size"
                raise MeshError(
                    f"mesh.extra={word!r}: the mesh already has an axis {axis!r}; {fix}"
                )
            extra_axes.add(axis)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> MeshConfig:
        """Returns a config from sizes by name, as `sizes` returns them."""
        extra = tuple(f"{axis}={size}" for axis, size in sizes.items() if axis not in AXES)
        return cls(**{axis: size for axis, size in sizes.items() if axis in AXES}, extra=extra)

    def sizes(self) -> dict[str, int]:
        """Returns the size of each axis by name, outermost first."""
        sizes: dict[str, int] = {axis: getattr(self, axis) for axis in AXES}
        for word in self.extra:
            axis, _, size = word.partition("=")
            sizes[axis] = int(size)
        return sizes

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.sizes().items() if size != 1]
        return " x ".join(sizes) or "1 device"

    def resolve(self, n_devices: int) -> MeshConfig:
        """Returns the same mesh with -1 replaced.

        Raises MeshError, with the nearest sizes that would work, if it does not fit n_devices.
        """
        sizes = self.sizes()
        invalid = [setting(axis, size) for axis, size in sizes.items() if size < 1 and size != -1]
        if invalid:
            raise MeshError(
                f"{', '.join(invalid)}: sizes are 1 or more, or -1 on one axis for whatever is left"
            )
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            if len(open_axes) == 2:
                fix = f"set {' or '.join(setting(axis, 1) for axis in open_axes)}"
            else:
                fix = "give each of the others a size"
            raise MeshError(f"only one mesh axis can be -1, not {' and '.join(open_axes)}; {fix}")

        n_fixed = math.prod(size for size in sizes.values() if size != -1)
        if open_axes and n_devices % n_fixed == 0:
            return MeshConfig.of(sizes | {open_axes[0]: n_devices // n_fixed})
        if n_fixed == n_devices and not open_axes:
            return self
        raise MeshError(
            f"mesh has {n_fixed}{' x ?' if open_axes else ''} devices ({self}) "
            f"but the number of visible devices is {n_devices}",
            self._choices(n_devices),
        )

    def _choices(self, n_devices: int) -> list[tuple[str, MeshConfig]]:
        """Returns the meshes that differ in one axis and fit.

        There is one size of an axis, or several where another axis is -1 and takes what is left.
        """
        sizes = self.sizes()
        is_open = -1 in sizes.values()
        choices: list[tuple[str, MeshConfig]] = []
        for axis, size in sizes.items():
            n_others = math.prod(s for a, s in sizes.items() if a != axis and s != -1)
            if size == -1 or n_devices % n_others:
                continue
            # An axis that is left at 1 is no choice, unless all axes are.
            if size == 1 and math.prod(sizes.values()) != 1:
                continue
            largest = n_devices // n_others
            if is_open:
                fitting = [n for n in range(1, largest + 1) if largest % n == 0]
            else:
                fitting = [largest]
            fitting.sort(key=lambda n: abs(n - size))
            choices += [(axis, MeshConfig.of(sizes | {axis: n})) for n in fitting]
        return choices


def setting(axis: str, size: int) -> str:
    """Returns the size of a mesh axis as a config spells it."""
    return f"mesh.{axis}={size}" if axis in AXES else f"mesh.extra={axis}={size}"


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh over `devices` (jax.Device; default: all).

    Devices are ordered by node (slice, then process, then id), so that the innermost axes stay
    inside a node. All axes are `AxisType.Auto`: XLA propagates shardings and inserts the
    collectives. Raises MeshError unless `config` uses all devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.resolve(len(devices)).sizes()
    devices.sort(key=lambda device: (*node_of(device), device.id))
    return Mesh(
        np.array(devices).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def node_of(device: Any) -> tuple[int, int]:
    """Returns the node of a jax.Device, as (slice, process): there is one process per node."""
    return (getattr(device, "slice_index", None) or 0, device.process_index)
