"""The speeds at which the lab prices a GPU, and where each is from.

They are shares of the peaks on the data sheet (`targets`), unless they say otherwise. There are two
sets. The optimistic one has what published kernels reach on a cool GPU. The sustained one has what
one H200 reached in runs of seconds, at the power limit, and the slow end of what is assumed of
links, which this project has not measured. A compiled program is priced with both: a predicted time
is a band.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

LinkName = Literal["NVLink", "network"]


class Rate(NamedTuple):
    """A number, and where it is from."""

    value: float
    source: Literal["measured", "published", "assumed", "given"]
    """published: by others, of similar kernels; given: by the user, with --hw."""
    origin: str
    """Which card and when, or which publication."""


@dataclasses.dataclass(frozen=True)
class AttentionRates:
    """Shares of the tensor cores' peak that attention kernels reach, of the FLOPs that a kernel
    reports, while its grid fills the SMs.
    """

    forward: Mapping[int, Rate]
    """By the number of keys. Between two numbers the share is linear in their logarithms."""
    backward: Mapping[int, Rate]
    deterministic: Rate
    """Share of the two kernels of the deterministic backward pass, which compute seven matmuls, not
    five."""


class LinkRate(NamedTuple):
    """A kind of collective over one kind of link, as a profile of this hardware has measured it."""

    latency_us: float | None
    """Microseconds of a collective of no bytes; None: as the latencies of `Rates` have it."""
    bytes_per_s: float
    """Bytes/s of one GPU's port in one direction (bus bandwidth over the ports of a node)."""
    group: int
    """Devices of the group that was measured."""
    nodes: int
    """Nodes that it spanned."""
    origin: str
    """Which profile."""
    has_other_nvlink: bool = False
    """Whether NVLink is another than that of the measurement between nodes, and may be slower than
    the network's ports."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """The speeds of a GPU: one end of the band of a predicted time."""

    name: str
    matmul: Rate
    """Share of the tensor cores' peak FLOP/s that large matmuls reach (cuBLAS)."""
    matmul_table: Rate
    """Share of the speeds in XLA's table of bf16 matmuls, which is of short runs."""
    memory: Mapping[str, Rate]
    """Share of the memory's peak bandwidth that kernels without matmuls reach, by the type of most
    of what they move: f32, or bf16 for all others."""
    attention: Mapping[int, AttentionRates]
    """By the width of a head: the nearest counts."""
    grouped: Rate
    """Share of the tensor cores' peak FLOP/s that the grouped matmuls of experts reach."""
    group_us: Rate
    """Microseconds that each group adds to a grouped matmul."""
    nvlink: Rate
    """Share of NVLink's peak bandwidth that collectives reach inside a node (NCCL's bus
    bandwidth)."""
    network: Rate
    """Share of the network port's peak bandwidth that collectives reach between nodes (the
    same)."""
    pcie: Rate
    """Share of PCIe's peak bandwidth that copies between a GPU and its host's pinned memory reach,
    one direction at a time."""
    kernel_us: Rate
    """Microseconds of the shortest kernel."""
    start_us: Rate
    """Microseconds of the start of a collective."""
    between_us: Rate
    """Microseconds added once for a group that spans nodes."""
    nvlink_step_us: Rate
    """Microseconds of one step of a collective inside a node."""
    network_step_us: Rate
    """Microseconds of one step of a collective between nodes."""
    links: Mapping[tuple[str, LinkName], LinkRate] = dataclasses.field(default_factory=dict)
    """By kind of collective and link, what a profile has measured. It takes the place of the shares
    and latencies above."""

    def attention_share(
        self, head_dim: int, n_keys: int, *, backward: bool, deterministic: bool
    ) -> float:
        """Returns the share of the peak of an attention kernel. 0 keys: many."""
        nearest = min(self.attention, key=lambda width: abs(width - (head_dim or 128)))
        rates = self.attention[nearest]
        if backward and deterministic:
            return rates.deterministic.value
        by_keys = rates.backward if backward else rates.forward
        return _between(by_keys, n_keys or max(by_keys))


def _between(rates: Mapping[int, Rate], at: int) -> float:
    """Returns the value at a number, interpolated in logarithms between the nearest two."""
    at = min(max(at, min(rates)), max(rates))
    below = max(n for n in rates if n <= at)
    above = min(n for n in rates if n >= at)
    if below == above:
        return rates[at].value
    weight = math.log(at / below) / math.log(above / below)
    return (1 - weight) * rates[below].value + weight * rates[above].value


# Where the numbers are from. The raw results are in benchmarks/results.
_SUITE = "NVIDIA H200, 2026-11-26 (gpu_suite_2026-11-26_h200-jax-0.11.2)"
_TRUTH = "NVIDIA H200, 2026-11-26 (gpu_truth_2026-11-26_h200-jax-0.11.2)"
_MINUTES = "NVIDIA H200, 2026-11-28 (gpu_minutes_2026-11-28_h200-jax-0.11.2_call2)"
_FLASH_3 = "a little under FlashAttention-3's 640 and 540 TFLOP/s on an H100 (arXiv 2407.08608)"
_NCCL = "NCCL's bus bandwidth, of which this project has measured none"

_PINNED = "large copies of pinned memory, of which this project has measured none"


def _suite(value: float) -> Rate:
    return Rate(value, "measured", _SUITE)


def _truth(value: float) -> Rate:
    return Rate(value, "measured", _TRUTH)


def _minutes(value: float) -> Rate:
    return Rate(value, "measured", _MINUTES)


TABLE_SHARE = 0.758
"""Share of an H100's peak that large matmuls have in XLA's table: 750 TFLOP/s."""
SPREAD = 2.0
"""Microseconds, which are assumed and the same at both ends, may be smaller or larger by this
factor. It is the range that a what-if gives them."""

_CUBLAS = Rate(0.77, "assumed", "cuBLAS on large matmuls, in short runs")
_COPY = Rate(0.9, "assumed", "copies of large arrays")
_LAUNCH = Rate(1.5, "assumed", "a launch inside a graph")
_LATENCY = "latencies of NCCL's rings, of which this project has measured none"
_START = Rate(8.0, "assumed", _LATENCY)
_BETWEEN = Rate(7.0, "assumed", _LATENCY)
_NVLINK_STEP = Rate(1.5, "assumed", _LATENCY)
_NETWORK_STEP = Rate(6.0, "assumed", _LATENCY)
_FLASH = AttentionRates(
    forward={16_384: Rate(0.62, "published", _FLASH_3)},
    backward={16_384: Rate(0.52, "published", _FLASH_3)},
    deterministic=Rate(0.52, "published", _FLASH_3),
)

OPTIMISTIC = Rates(
    name="optimistic",
    matmul=_CUBLAS,
    matmul_table=Rate(1.0, "published", "XLA's table for the H100"),
    memory={"bf16": _COPY, "f32": _COPY},
    attention={128: _FLASH},
    grouped=_CUBLAS,
    group_us=Rate(0.0, "assumed", "groups cost nothing"),
    nvlink=Rate(0.78, "assumed", _NCCL),
    network=Rate(0.84, "assumed", _NCCL),
    pcie=Rate(0.86, "assumed", _PINNED),
    kernel_us=_LAUNCH,
    start_us=_START,
    between_us=_BETWEEN,
    nvlink_step_us=_NVLINK_STEP,
    network_step_us=_NETWORK_STEP,
)
"""Those of every prediction up to November 2026."""

SUSTAINED = Rates(
    name="sustained",
    matmul=_truth(0.69),
    matmul_table=_truth(0.69 / TABLE_SHARE),
    memory={"bf16": _truth(0.68), "f32": _truth(0.86)},
    attention={
        64: AttentionRates(
            forward={1024: _minutes(0.25), 2048: _minutes(0.31), 16_384: _minutes(0.45)},
            backward={1024: _minutes(0.27), 2048: _minutes(0.35), 16_384: _minutes(0.46)},
            deterministic=_suite(0.49),
        ),
        128: AttentionRates(
            forward={2048: _minutes(0.49), 16_384: _suite(0.60)},
            backward={2048: _minutes(0.42), 16_384: _suite(0.54)},
            deterministic=_suite(0.65),
        ),
    },
    grouped=_minutes(0.60),
    group_us=_minutes(0.6),
    nvlink=Rate(0.70, "assumed", _NCCL),
    network=Rate(0.65, "assumed", _NCCL),
    # As if the GPUs of a node shared the bandwidth of their host's memory.
    pcie=Rate(0.6, "assumed", _PINNED),
    kernel_us=_LAUNCH,
    start_us=_START,
    between_us=_BETWEEN,
    nvlink_step_us=_NVLINK_STEP,
    network_step_us=_NETWORK_STEP,
)
"""Compute as one H200 sustains it; on other GPUs the same shares are assumed. Links at the slow end
of what is assumed."""


class Link(NamedTuple):
    """A link of a GPU whose speed is assumed."""

    name: str
    fast: Rate
    slow: Rate

    def __str__(self) -> str:
        return f"{self.name} at {self.slow.value:g} to {self.fast.value:g} of its peak"


NVLINK = Link("NVLink", OPTIMISTIC.nvlink, SUSTAINED.nvlink)
NETWORK = Link("the network", OPTIMISTIC.network, SUSTAINED.network)
PCIE = Link("PCIe", OPTIMISTIC.pcie, SUSTAINED.pcie)
