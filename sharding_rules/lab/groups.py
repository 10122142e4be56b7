"""Who takes part in a collective: every spelling of groups in HLO, as positions in the mesh, and
the mesh axes along which they vary.

Numbers in HLO are positions in the program's device assignment, which is the mesh's own order
(mesh.devices.flat), never device ids. Spellings: explicit lists `{{0,1},{2,3}}`, tilings of an iota
`[2,4]<=[4,2]T(1,0)`, named axes `mesh['a'=2,'b'=4] {'b'}` with parts of axes `'b':(2)2`
(xla/hlo/ir/replica_group.h), and `source_target_pairs`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np
from jax.sharding import Mesh

from sharding_rules.mesh import node_of

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_NAMED = re.compile(r"replica_groups=@?mesh\[(.*?)\](?:,?\s*device_ids=\((.*?)\)\)?)?\s*\{(.*?)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}")


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Positions of devices in the mesh, [groups, members]; of a permute the pairs (from, to), those
    to itself left out.
    """

    members: np.ndarray
    pairs: bool = False

    @property
    def size(self) -> int:
        """Devices in each group."""
        return self.members.shape[1]

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Mesh axes that vary within a group, in mesh order."""
        where = np.unravel_index(self.members, mesh.devices.shape)
        varies = [bool((index != index[:, :1]).any()) for index in where]
        return tuple(itertools.compress(mesh.axis_names, varies))

    def partial(self, mesh: Mesh) -> bool:
        """A group is only a part of its axes. Never so of pairs."""
        return not self.pairs and self.size < math.prod(
            mesh.shape[axis] for axis in self.axes(mesh)
        )

    def nodes(self, mesh: Mesh) -> int:
        """NVLink domains that one group spans, the most of all groups: devices of one process share
        one.
        """
        if not self.members.size:
            return 1
        domains: dict[tuple[int, int], int] = {}
        of = [domains.setdefault(node_of(d), len(domains)) for d in mesh.devices.flat]
        inside = np.sort(np.array(of)[self.members], axis=1)
        return 1 + int((inside[:, 1:] != inside[:, :-1]).sum(axis=1).max())


def parse(attributes: str, n_devices: int) -> Groups:
    """The groups in the attributes of a collective; without any, or with an empty list, all devices
    are one.
    """
    if match := _PAIRS.search(attributes):
        pairs = np.array(
            [_numbers(pair) for pair in re.findall(r"\{(.*?)\}", match[1])], int
        ).reshape(-1, 2)
        return Groups(pairs[pairs[:, 0] != pairs[:, 1]], pairs=True)
    if match := _NAMED.search(attributes):
        return Groups(_named(match[1], match[2] or "", match[3]))
    if match := _IOTA.search(attributes):
        return Groups(_iota(_numbers(match[2]), match[3]).reshape(_numbers(match[1])))
    if match := _LISTS.search(attributes):
        return Groups(_even([_numbers(group) for group in re.findall(r"\{(.*?)\}", match[1])]))
    return Groups(np.arange(n_devices)[None])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(shape: list[int], order: str | None) -> np.ndarray:
    tile = np.arange(math.prod(shape)).reshape(shape)
    return tile.transpose(_numbers(order)) if order else tile


def _even(groups: list[list[int]]) -> np.ndarray:
    """Shorter groups are filled up with their own first member."""
    longest = max(map(len, groups))
    return np.array([group + group[:1] * (longest - len(group)) for group in groups if group], int)


def _named(axes: str, devices: str, chosen: str) -> np.ndarray:
    """Groups along `chosen` axes, or parts of axes, of a mesh that need not be ours.

    `'b':(2)3` is the middle part of an axis that is split into 2 x 3 x the rest, outermost first.
    """
    sizes = [(name, int(size)) for name, size in re.findall(r"([^'\",=\s]+)['\"]?=(\d+)", axes)]
    uses = [
        (name, int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"([\w.\-]+)['\"]?(?::\((\d+)\)(\d+))?", chosen)
    ]
    shape: list[int] = []
    kept: list[tuple[int, int]] = []
    for name, whole in sizes:
        parts = [
            (turn, low, low * (size or whole))
            for turn, (used, low, size) in enumerate(uses)
            if used == name
        ]
        cuts = sorted({1, whole}.union(*((low, high) for _, low, high in parts)))
        for low, high in itertools.pairwise(cuts):
            kept += [
                (turn, len(shape)) for turn, first, last in parts if first <= low and high <= last
            ]
            shape.append(high // low)
    inner = [dim for _, dim in sorted(kept)]
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    ids = _devices(devices, math.prod(shape)).reshape(shape)
    return ids.transpose(outer + inner).reshape(-1, math.prod(shape[dim] for dim in inner))


def _devices(text: str, n_devices: int) -> np.ndarray:
    """The order of a named mesh: an iota `[8,16]T(1,0)`, a plain list, or nothing."""
    if match := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", text):
        return _iota(_numbers(match[1]), match[2])
    return np.array(_numbers(text)) if text else np.arange(n_devices)
