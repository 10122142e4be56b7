"""The devices that take part in a collective, and the mesh axes along which they vary.

Numbers in HLO are positions in the program's device assignment, which is the mesh's own order
(mesh.devices.flat), never device ids. XLA spells groups in four ways (xla/hlo/ir/replica_group.h),
each with a pattern below; `parse` reads them all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from sharding_rules.mesh import node_of

# source_target_pairs={{0,1},{1,0}}, of a permute
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
# replica_groups={{0,1},{2,3}}
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}")
_BRACES = re.compile(r"\{(.*?)\}")
# replica_groups=[2,4]<=[4,2]T(1,0), an iota of shape [4,2], transposed and reshaped to [2,4]
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# replica_groups=mesh['a'=2,'b'=4] {'b'}
# replica_groups=@mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}
_NAMED = re.compile(r"replica_groups=@?mesh\[(.*?)\](?:,?\s*device_ids=\((.*?)\)\)?)?\s*\{(.*?)\}")
# 'b'=4
_SIZE = re.compile(r"([^'\",=\s]+)['\"]?=(\d+)")
# 'b', a whole axis
# 'b':(2)3, the middle part of an axis that is split into 2 x 3 x others, outermost first
_PART = re.compile(r"([\w.\-]+)['\"]?(?::\((\d+)\)(\d+))?")
# [4,2]T(1,0)
_DEVICE_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?")


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a collective, or the pairs of a permute."""

    members: np.ndarray
    """Positions of devices in the mesh, [groups, members]. For a permute, the pairs (from, to),
    without those from a device to itself."""
    pairs: bool = False

    @property
    def size(self) -> int:
        """Devices in each group."""
        return self.members.shape[1]

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the mesh axes that vary within a group, in mesh order."""
        coordinates = np.unravel_index(self.members, mesh.devices.shape)
        varies = [bool((index != index[:, :1]).any()) for index in coordinates]
        return tuple(itertools.compress(mesh.axis_names, varies))

    def partial(self, mesh: Mesh) -> bool:
        """Whether a group is only a part of its axes; always False for pairs."""
        if self.pairs:
            return False
        return self.size < math.prod(mesh.shape[axis] for axis in self.axes(mesh))

    def nodes(self, mesh: Mesh) -> int:
        """Returns the NVLink domains that one group spans, the most of all groups.

        The devices of one process share a domain.
        """
        if not self.members.size:
            return 1
        domains: dict[tuple[int, int], int] = {}
        device_domains = []
        for device in mesh.devices.flat:
            device_domains.append(domains.setdefault(node_of(device), len(domains)))
        group_domains = np.sort(np.array(device_domains)[self.members], axis=1)
        changes = group_domains[:, 1:] != group_domains[:, :-1]
        return 1 + int(changes.sum(axis=1).max())


def parse(attributes: str, n_devices: int) -> Groups:
    """Returns the groups in the attributes of a collective.

    Without any, or with an empty list, all devices are one group.
    """
    match = _PAIRS.search(attributes)
    if match:
        pairs = np.array([_numbers(pair) for pair in _BRACES.findall(match[1])], int).reshape(-1, 2)
        return Groups(pairs[pairs[:, 0] != pairs[:, 1]], pairs=True)
    match = _NAMED.search(attributes)
    if match:
        axes, device_order, parts = match.groups(default="")
        return Groups(_named_groups(axes, device_order, parts))
    match = _IOTA.search(attributes)
    if match:
        shape, iota_shape, order = match.groups()
        return Groups(_iota(_numbers(iota_shape), order).reshape(_numbers(shape)))
    match = _LISTS.search(attributes)
    if match:
        return Groups(_rectangle([_numbers(group) for group in _BRACES.findall(match[1])]))
    return Groups(np.arange(n_devices)[None])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(shape: list[int], order: str | None) -> np.ndarray:
    tile = np.arange(math.prod(shape)).reshape(shape)
    return tile.transpose(_numbers(order)) if order else tile


def _rectangle(groups: list[list[int]]) -> np.ndarray:
    """Returns [groups, members]; shorter groups are padded with their own first member."""
    longest = max(map(len, groups))
    padded = [group + group[:1] * (longest - len(group)) for group in groups if group]
    return np.array(padded, int)


class _AxisPart(NamedTuple):
    """A part of a mesh axis, such as 'b':(2)3."""

    low: int
    """The product of the sizes outside of it: 2."""
    high: int
    """The product of the sizes outside of it and its own: 6."""
    position: int
    """In the list of parts, which is the order of members in a group."""


def _named_groups(axes: str, device_order: str, parts: str) -> np.ndarray:
    """Returns the groups along axes, or parts of axes, of a mesh that need not be ours."""
    sizes = {name: int(size) for name, size in _SIZE.findall(axes)}
    parts_by_axis: dict[str, list[_AxisPart]] = {name: [] for name in sizes}
    for position, (name, size_outside, size) in enumerate(_PART.findall(parts)):
        if name in sizes:
            low = int(size_outside or 1)
            high = low * int(size or sizes[name])
            parts_by_axis[name].append(_AxisPart(low, high, position))

    # Split each axis at the ends of its parts. Dimensions inside of a part are members of a group,
    # the others number the groups.
    shape: list[int] = []
    member_dims: list[tuple[int, int]] = []
    for name, size in sizes.items():
        cuts = {1, size}
        for part in parts_by_axis[name]:
            cuts |= {part.low, part.high}
        for low, high in itertools.pairwise(sorted(cuts)):
            for part in parts_by_axis[name]:
                if part.low <= low and high <= part.high:
                    member_dims.append((part.position, len(shape)))
            shape.append(high // low)
    inner = [dim for _, dim in sorted(member_dims)]
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    ids = _devices(device_order, math.prod(shape)).reshape(shape)
    return ids.transpose(outer + inner).reshape(-1, math.prod(shape[dim] for dim in inner))


def _devices(text: str, n_devices: int) -> np.ndarray:
    """Returns the device order of a named mesh: a transposed iota, a plain list, or nothing."""
    match = _DEVICE_ORDER.match(text)
    if match:
        shape, order = match.groups()
        return _iota(_numbers(shape), order)
    return np.array(_numbers(text)) if text else np.arange(n_devices)
