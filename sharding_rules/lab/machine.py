"""The hardware that a prediction is for: a target, and constants of it that the user has changed.

`Machine.of("h100,nvlink=off,nic=25")` is an H100 without NVLink and with 200 Gb/s ports.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sharding_rules.lab.profile import Profile, load_profile
from sharding_rules.lab.rates import (
    OPTIMISTIC,
    SPREAD,
    SUSTAINED,
    TABLE_SHARE,
    AttentionRates,
    LinkName,
    LinkRate,
    Rate,
    Rates,
)
from sharding_rules.lab.report import Change, LabError
from sharding_rules.lab.targets import TARGETS, Target
from sharding_rules.rules import did_you_mean

UNCHECKED = "unchecked"
"""The word that takes a profile of other hardware."""
_OFF = "off"
_DEFAULT = "h100"
_GIVEN = "--hw"
_DATA_SHEET = "NVIDIA's data sheet"


class Constant(NamedTuple):
    """A number of the hardware that --hw can change."""

    name: str
    unit: str
    """With a space before it; empty for a share of a peak."""
    meaning: str
    scale: float
    """What a value in this unit is multiplied with."""
    origin: str
    """Where a target's own value is from; empty for a rate, which says so itself."""
    target_fields: tuple[str, ...] = ()
    """The fields of Target that it sets."""
    rate_fields: tuple[str, ...] = ()
    """The fields of Rates that it sets."""
    is_compiled: bool = False
    """XLA reads it: a program is compiled for one value of it, and is not replayed at another."""

    def text(self, value: float) -> str:
        """Returns a value, in the unit of the code, as a person writes it."""
        return f"{value / self.scale:.4g}{self.unit}"


CONSTANTS = (
    Constant(
        "nvlink", " GB/s", "bytes/s of one GPU in one direction inside a node; off: over PCIe",
        1e9, _DATA_SHEET, ("nvlink",),
    ),
    Constant(
        "nic", " GB/s", "bytes/s of one GPU in one direction between nodes: 50 is a 400 Gb/s port",
        1e9, "assumed: one port for each GPU", ("network",),
    ),
    Constant(
        "node", " GPUs", "GPUs of a node, which NVLink connects",
        1, "assumed: a node of NVIDIA's HGX", ("node",), is_compiled=True,
    ),
    Constant(
        "memory", " GiB", "memory of one GPU",
        2**30, _DATA_SHEET, ("hbm",), is_compiled=True,
    ),
    Constant(
        "bandwidth", " GB/s", "bytes/s between a GPU and its memory",
        1e9, _DATA_SHEET, ("hbm_bandwidth",), is_compiled=True,
    ),
    Constant(
        "flops", " TFLOP/s", "peak of the tensor cores in bf16; other types in proportion",
        1e12, _DATA_SHEET, ("flops",),
    ),
    Constant("watts", " W", "power limit of one GPU", 1, _DATA_SHEET, ("watts",)),
    Constant(
        "matmul", "", "share of the peak that large matmuls reach",
        1, "", (), ("matmul", "matmul_table"),
    ),
    Constant(
        "attention", "", "share of the peak that attention kernels reach, whatever their length",
        1, "", (), ("attention",),
    ),
    Constant(
        "grouped", "", "share of the peak that grouped matmuls of experts reach",
        1, "", (), ("grouped",),
    ),
    Constant(
        "group_us", " µs", "time that each group adds to a grouped matmul",
        1, "", (), ("group_us",),
    ),
    Constant(
        "elementwise", "", "share of the memory's bandwidth that kernels without matmuls reach",
        1, "", (), ("memory",),
    ),
    Constant(
        "nvlink_share", "", "share of NVLink's bandwidth that collectives reach",
        1, "", (), ("nvlink",),
    ),
    Constant(
        "nic_share", "", "share of the network port's bandwidth that collectives reach",
        1, "", (), ("network",),
    ),
    Constant("kernel_us", " µs", "time of the shortest kernel", 1, "", (), ("kernel_us",)),
    Constant("start_us", " µs", "start of a collective", 1, "", (), ("start_us",)),
    Constant(
        "between_us", " µs", "what the start of a collective between nodes adds",
        1, "", (), ("between_us",),
    ),
    Constant(
        "nvlink_step_us", " µs", "one step of a collective inside a node",
        1, "", (), ("nvlink_step_us",),
    ),
    Constant(
        "nic_step_us", " µs", "one step of a collective between nodes",
        1, "", (), ("network_step_us",),
    ),
)  # fmt: skip
"""All that --hw can change."""
_BY_NAME = {constant.name: constant for constant in CONSTANTS}
_LINK_OF: Mapping[str, LinkName] = {
    "nvlink": "NVLink",
    "nvlink_share": "NVLink",
    "nic": "network",
    "nic_share": "network",
}
"""Constants of a link's bandwidth, and the link."""
_LATENCIES: Mapping[str, tuple[LinkName, ...]] = {
    "start_us": ("NVLink", "network"),
    "between_us": ("network",),
    "nvlink_step_us": ("NVLink", "network"),
    "nic_step_us": ("network",),
}
"""Constants of a latency, and the links over which it counts."""
_SHARES = {constant.name for constant in CONSTANTS if constant.rate_fields and not constant.unit}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A target with its changes, and the rates at both ends of the band."""

    target: Target
    fast: Rates = OPTIMISTIC
    slow: Rates = SUSTAINED
    changes: tuple[Change, ...] = ()

    @staticmethod
    def of(words: str, device: str = "") -> Machine:
        """Returns the machine that `h100,nvlink=off,nic=25,profile.json` describes.

        Args:
          words: the name of a target; changes, NAME=VALUE; files of profiles; and "unchecked",
            which takes a profile of other hardware. A change or a profile that comes later wins.
          device: the target, if the words name none; empty: that of the profiles, else the h100.

        Raises LabError for a device, a constant or a value that does not exist, two devices, and a
        profile that cannot be read or is of other hardware.
        """
        parts = [word.strip() for word in words.split(",") if word.strip()]
        files = [word for word in parts if word.endswith(".json") and "=" not in word]
        names = [word for word in parts if "=" not in word and word not in (*files, UNCHECKED)]
        profiles = {file: load_profile(file) for file in files}
        target = _target(names, list(profiles.values()), device)
        machine = Machine(target)
        for word in parts:
            name, equals, value = word.partition("=")
            if equals:
                machine = machine.with_constant(name, value)
            elif word in profiles:
                if UNCHECKED not in parts:
                    profiles[word].require_hardware(target.name, target.description)
                machine = machine.measured(profiles[word])
        return machine

    @property
    def name(self) -> str:
        """The target's name, with a * where constants of it were changed."""
        return f"{self.target.name}*" if self.changes else self.target.name

    @property
    def recompiled(self) -> tuple[str, ...]:
        """The names of the changed constants for which a program must be compiled."""
        return tuple(c.name for c in self.changes if c.name in _BY_NAME and _compiled(c.name))

    def with_constant(self, name: str, text: str) -> Machine:
        """Returns the machine with another value of a constant, in its unit: ("nic", "25").

        It takes the place of what a profile has measured of that link.

        Raises LabError if there is no such constant, or the value is nonsense.
        """
        constant = _constant(name)
        usual = constant.text(_value(constant, self.target, self.fast))
        usual = next((change.usual for change in self.changes if change.name == name), usual)
        if constant.name == "nvlink" and text == _OFF:
            value = self.target.pcie
            shown = f"off: {constant.text(value)} over PCIe"
        else:
            value = _parsed(constant, text) * constant.scale
            shown = constant.text(value)
        machine = self.moved(constant, value)._without_measured(name)
        others = tuple(change for change in machine.changes if change.name != name)
        return dataclasses.replace(machine, changes=(*others, Change(name, usual, shown, _GIVEN)))

    def moved(self, constant: Constant, value: float, origin: str = _GIVEN) -> Machine:
        """Returns the machine with another value, in the unit of the code, at both ends of the
        band. Its changes stay as they are.
        """
        if constant.target_fields:
            return self._moved_target(constant, value)
        fast = moved_rates(self.fast, constant, value, origin)
        slow = moved_rates(self.slow, constant, value, origin)
        return dataclasses.replace(self, fast=fast, slow=slow)

    def _moved_target(self, constant: Constant, value: float) -> Machine:
        (field,) = constant.target_fields
        if field != "flops":
            number = int(value) if field in ("node", "hbm") else value
            return dataclasses.replace(
                self, target=dataclasses.replace(self.target, **{field: number})
            )
        ratio = value / self.target.flops["bf16"]
        flops = {dtype: ratio * peak for dtype, peak in self.target.flops.items()}
        # XLA's table of matmuls is that of the real GPU: its speeds grow with the peak.
        return dataclasses.replace(
            self,
            target=dataclasses.replace(self.target, flops=flops),
            fast=_with_table(self.fast, ratio),
            slow=_with_table(self.slow, ratio),
        )

    def _without_measured(self, name: str) -> Machine:
        """Returns the machine without what profiles have measured in the place of a constant."""
        links = {}
        for (kind, link), rate in self.fast.links.items():
            if _LINK_OF.get(name) == link:
                continue
            if link in _LATENCIES.get(name, ()):
                rate = rate._replace(latency_us=None)
            elif _LINK_OF.get(name) == "NVLink":
                rate = rate._replace(has_other_nvlink=True)
            links[kind, link] = rate
        new = {change.name: change for change in _link_changes(links)}
        old = {change.name for change in _link_changes(self.fast.links)}
        changes = []
        for change in self.changes:
            if change.name in new:
                changes.append(new[change.name])
            elif change.name not in old:
                changes.append(change)
        return dataclasses.replace(
            self,
            fast=dataclasses.replace(self.fast, links=links),
            slow=dataclasses.replace(self.slow, links=links),
            changes=tuple(changes),
        )

    def measured(self, profile: Profile) -> Machine:
        """Returns the machine at the speeds of links and matmuls that a profile has."""
        links = profile.link_rates()
        fast = dataclasses.replace(self.fast, links={**self.fast.links, **links})
        slow = dataclasses.replace(self.slow, links={**self.slow.links, **links})
        machine = dataclasses.replace(self, fast=fast, slow=slow)
        changes = list(_link_changes(links))
        share = profile.matmul_share()
        if share is not None:
            constant = _BY_NAME["matmul"]
            usual = constant.text(_value(constant, self.target, self.fast))
            changes.append(Change("matmul", usual, constant.text(share), profile.name))
            machine = machine.moved(constant, share, profile.name)
        measured_names = {change.name for change in changes}
        others = [change for change in self.changes if change.name not in measured_names]
        return dataclasses.replace(machine, changes=(*others, *changes))

    def ranges(self) -> Iterator[Range]:
        """Yields the stated range of each rate that nobody has given or measured."""
        settled = {change.name for change in self.changes}
        for constant in CONSTANTS:
            if constant.rate_fields and constant.name not in settled:
                yield _range(constant, self)


class Range(NamedTuple):
    """A constant between its two ends."""

    constant: Constant
    low: Rates
    """The fast rates, with this constant alone at one end."""
    high: Rates
    low_text: str
    high_text: str
    source: str
    """Who states the range: measured, published, assumed."""


def _link_changes(links: Mapping[tuple[str, LinkName], LinkRate]) -> Iterator[Change]:
    """Yields the measured speeds as changes of what is assumed."""
    for (kind, link), rate in links.items():
        value = f"{rate.bytes_per_s / 1e9:.4g} GB/s"
        if rate.latency_us is not None:
            value += f", {rate.latency_us:.3g} µs"
        yield Change(f"{kind} over {link}", "assumed", value, rate.origin)


def machine_of(hardware: str | Machine) -> Machine:
    """Returns the machine itself, or that of a target's name. Raises LabError for no target."""
    if isinstance(hardware, Machine):
        return hardware
    if hardware not in TARGETS:
        raise LabError(f"no target {hardware!r}{did_you_mean(hardware, list(TARGETS))}")
    return Machine(TARGETS[hardware])


def constants_of(target: Target) -> Iterator[tuple[str, str, str]]:
    """Yields the constants of a target: name, value with its unit, and where it is from."""
    for constant in CONSTANTS:
        if constant.target_fields:
            value = constant.text(_value(constant, target, OPTIMISTIC))
            yield constant.name, value, constant.origin


def moved_rates(rates: Rates, constant: Constant, value: float, origin: str = _GIVEN) -> Rates:
    """Returns rates with one constant at another value."""
    rate = Rate(value, "given", origin)
    new: dict[str, Any] = {}
    for field in constant.rate_fields:
        if field == "matmul_table":
            new[field] = Rate(value / TABLE_SHARE, "given", origin)
        elif field == "memory":
            new[field] = dict.fromkeys(rates.memory, rate)
        elif field == "attention":
            alike = AttentionRates({16_384: rate}, {16_384: rate}, rate)
            new[field] = dict.fromkeys(rates.attention, alike)
        else:
            new[field] = rate
    return dataclasses.replace(rates, **new)


def rate_value(constant: Constant, rates: Rates) -> float:
    """Returns the number of a rate: of several, that of bf16, of heads of 128, of most keys."""
    return _rate(constant, rates).value


def _rate(constant: Constant, rates: Rates) -> Rate:
    value = getattr(rates, constant.rate_fields[0])
    if constant.name == "elementwise":
        return value["bf16"]
    if constant.name == "attention":
        by_keys = value[max(value)].forward
        return by_keys[max(by_keys)]
    return value


def _value(constant: Constant, target: Target, rates: Rates) -> float:
    if constant.rate_fields:
        return rate_value(constant, rates)
    (field,) = constant.target_fields
    value = getattr(target, field)
    return value["bf16"] if isinstance(value, Mapping) else value


def _range(constant: Constant, machine: Machine) -> Range:
    fast = _rate(constant, machine.fast)
    slow = _rate(constant, machine.slow)
    if fast != slow or constant.rate_fields == ("attention",):
        fields = {field: getattr(machine.slow, field) for field in constant.rate_fields}
        sources = dict.fromkeys([slow.source, fast.source])
        return Range(
            constant=constant,
            low=dataclasses.replace(machine.fast, **fields),
            high=machine.fast,
            low_text=constant.text(slow.value),
            high_text=constant.text(fast.value),
            source=" to ".join(sources),
        )
    # The same at both ends: assumed, and not known to better than a factor.
    low = fast.value / SPREAD
    high = fast.value * SPREAD
    return Range(
        constant=constant,
        low=moved_rates(machine.fast, constant, low),
        high=moved_rates(machine.fast, constant, high),
        low_text=constant.text(low),
        high_text=constant.text(high),
        source=f"assumed, by a factor of {SPREAD:g}",
    )


def _with_table(rates: Rates, ratio: float) -> Rates:
    table = rates.matmul_table
    return dataclasses.replace(rates, matmul_table=table._replace(value=ratio * table.value))


def _constant(name: str) -> Constant:
    if name not in _BY_NAME:
        raise LabError(
            f"--hw={name}: there is no such constant{did_you_mean(name, list(_BY_NAME))}; there "
            f"are {', '.join(_BY_NAME)}"
        )
    return _BY_NAME[name]


def _compiled(name: str) -> bool:
    return _BY_NAME[name].is_compiled


def _parsed(constant: Constant, text: str) -> float:
    """Returns a value in the constant's unit. Raises LabError if it is nonsense."""
    expected = constant.unit.strip() or "a share above 0 and up to 1"
    problem = f"--hw={constant.name}={text}: expected {expected} ({constant.meaning})"
    try:
        value = float(text)
    except ValueError as error:
        raise LabError(problem) from error
    if not 0 < value < math.inf or (constant.name in _SHARES and value > 1):
        raise LabError(problem)
    if constant.name == "node" and value != int(value):
        raise LabError(problem)
    return value


def _target(names: Sequence[str], profiles: Sequence[Profile], device: str) -> Target:
    """Returns the target that the words name, else the device, else that of the last profile."""
    if len(names) > 1:
        raise LabError(f"--hw={','.join(names)}: one device at a time")
    name = names[0] if names else device
    if not name:
        name = _DEFAULT
        for profile in profiles:
            name = _target_of(profile.device) or name
    if name not in TARGETS:
        raise LabError(
            f"--hw={name}: there is no such device{did_you_mean(name, list(TARGETS))}; there are "
            f"{', '.join(TARGETS)}, changes NAME=VALUE, and profiles ending in .json"
        )
    return TARGETS[name]


def _target_of(device: str) -> str:
    by_description = {target.description: target.name for target in TARGETS.values()}
    return by_description.get(device, "")
