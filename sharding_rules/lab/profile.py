"""Speeds of links and matmuls that were measured on one kind of hardware.

A profile is a JSON file. Its speeds take the place of those that the lab assumes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sharding_rules.lab.prices import link_bytes
from sharding_rules.lab.rates import LinkName, LinkRate
from sharding_rules.lab.report import LabError

FORMAT = 1
"""The number that a profile's format has; it changes when an older reader would misread the
file."""
_KEYS = {"format", "platform", "device", "date"}


class Fit(NamedTuple):
    """Time = latency + bytes / bandwidth, fitted to the times of one collective over one axis."""

    latency_us: float
    bytes_per_s: float
    """Bandwidth of the bytes that a device sends in a ring (bus bandwidth)."""
    error: float
    """Mean of |fitted / measured - 1|."""


class Point(NamedTuple):
    """One size of a collective, measured."""

    payload: int
    """Bytes of the whole array."""
    wire: float
    """Bytes that a device sends in a ring."""
    us: float
    """Median of one run."""
    spread: float
    """(highest - lowest) / median of the samples."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One kind of collective over one mesh axis."""

    kind: str
    """As XLA names it: all-reduce."""
    axis: str
    group: int
    """Devices along the axis."""
    nodes: int
    """Processes that they belong to."""
    fit: Fit
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One square matmul in bf16, measured."""

    size: int
    us: float
    flops_per_s: float
    share: float | None
    """Share of the peak on the data sheet; None where the device's peak is not known."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Speeds of links and of matmuls on one kind of hardware."""

    platform: str
    """cpu, gpu."""
    device: str
    """JAX's name for the device: NVIDIA H200."""
    date: str
    collectives: tuple[Measured, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    n_devices: int = 1
    n_processes: int = 1
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = "profile.json"
    """The file's name."""

    def require_hardware(self, target: str, description: str) -> None:
        """Raises LabError unless the profile was measured on such a device."""
        if self.device == description:
            return
        what = "a CPU" if self.platform == "cpu" else self.device
        raise LabError(
            f"{self.name} was measured on {what}, and the plan is for {target}; add unchecked to "
            "--hw to use it all the same"
        )

    def link_rates(self) -> dict[tuple[str, LinkName], LinkRate]:
        """Returns the speed of each kind of collective over each kind of link.

        Where several axes have the same kind of link, the one with the most devices counts.
        """
        rates: dict[tuple[str, LinkName], LinkRate] = {}
        for one in sorted(self.collectives, key=lambda one: one.group):
            if one.group < 2:
                continue
            link: LinkName = "network" if one.nodes > 1 else "NVLink"
            nvlink_bytes, network_bytes = link_bytes(one.kind, 1.0, one.group, one.nodes)
            of_port = network_bytes if one.nodes > 1 else nvlink_bytes
            rates[one.kind, link] = LinkRate(
                latency_us=one.fit.latency_us,
                bytes_per_s=of_port * one.fit.bytes_per_s,
                group=one.group,
                nodes=one.nodes,
                origin=self.name,
            )
        return rates

    def matmul_share(self) -> float | None:
        """Returns the share of the peak that the largest matmul has reached; None if unknown."""
        shares = [matmul for matmul in self.matmuls if matmul.share is not None]
        return max(shares, key=lambda matmul: matmul.size).share if shares else None

    def merged(self, other: Profile) -> Profile:
        """Returns this profile with what `other` has measured on the same hardware and this has
        not: collectives of another kind, axis, group or number of nodes, and matmuls of another
        size. Raises LabError if the hardware differs.
        """
        if (self.platform, self.device) != (other.platform, other.device):
            raise LabError(
                f"{other.name} was measured on {other.device}, not on {self.device}: choose "
                "another file for this profile"
            )
        collectives = {_subject(one): one for one in other.collectives}
        for one in self.collectives:
            # At the end, where `link_rates` prefers it to an older one of as many devices.
            collectives.pop(_subject(one), None)
            collectives[_subject(one)] = one
        matmuls = {one.size: one for one in (*other.matmuls, *self.matmuls)}
        return dataclasses.replace(
            self,
            collectives=tuple(collectives.values()),
            matmuls=tuple(matmuls.values()),
            mesh=self.mesh or other.mesh,
            n_devices=max(self.n_devices, other.n_devices),
            n_processes=max(self.n_processes, other.n_processes),
        )

    def to_json(self) -> str:
        """Returns the text that `load_profile` reads."""
        data = {"format": FORMAT, **dataclasses.asdict(self)}
        del data["name"]
        for collective in data["collectives"]:
            collective["fit"] = collective["fit"]._asdict()
            collective["points"] = [point._asdict() for point in collective["points"]]
        return json.dumps(data, indent=1)


def _subject(one: Measured) -> tuple[str, str, int, int]:
    """Returns what was measured, whatever came out."""
    return one.kind, one.axis, one.group, one.nodes


def load_profile(file: str) -> Profile:
    """Returns the profile in a file.

    Raises LabError if the file cannot be read, is no profile, or is of another format.
    """
    path = Path(file).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise LabError(f"{file} is no profile: it is not JSON") from error
    if not isinstance(data, dict) or not data.keys() >= _KEYS:
        raise LabError(f"{file} is no profile: it names no format, platform, device and date")
    if data["format"] != FORMAT:
        raise LabError(
            f"{file} has format {data['format']}, and this version reads format {FORMAT}: measure "
            "the profile again"
        )
    try:
        return _profile(data, path.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LabError(f"{file} is a damaged profile: {error!r}") from error


def _profile(data: dict[str, Any], name: str) -> Profile:
    fields = {key: value for key, value in data.items() if key != "format"}
    fields["collectives"] = tuple(_measured(one) for one in data.get("collectives", ()))
    fields["matmuls"] = tuple(Matmul(**one) for one in data.get("matmuls", ()))
    return Profile(**fields, name=name)


def _measured(data: dict[str, Any]) -> Measured:
    points: Sequence[Point] = [Point(**point) for point in data["points"]]
    fit = Fit(**data["fit"])
    if not (fit.latency_us >= 0 and fit.bytes_per_s > 0):
        raise ValueError(f"{data['kind']} over {data['axis']} has no bandwidth")
    return Measured(**{**data, "fit": fit, "points": tuple(points)})
