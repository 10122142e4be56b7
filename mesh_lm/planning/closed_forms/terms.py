"""A collective of a step, and the sums over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

AG = "all-gather"
RS = "reduce-scatter"
AR = "all-reduce"
CP = "collective-permute"
A2A = "all-to-all"

REPLICAS = ("data", "sequence", "ulysses", "node", "expert")
"""The axes along which weights are replicated, and over which the engine sums gradients."""
BYTES = {"bf16": 2, "f32": 4, "s8": 1, "s32": 4}
Per = Literal[
    "forward",
    "backward",
    "recompute",
    "gather",
    "regather",
    "microbatch",
    "chunk",
    "forward tick",
    "backward tick",
    "row",
    "step",
]
"""What a form counts its runs by.

forward, backward: a layer's pass, in each microbatch; with stages, in each tick that has that slot,
of the layers of one chunk. recompute: a backward pass of a layer with model.remat, where not all
layers have it. gather: a layer's forward pass, as far as what it gathers is of use. regather: a
backward pass of a layer that has not kept its matrices, or the one gather before the first of
these. chunk: of the loss. row: a layer of this stage, once a step."""


class Form(NamedTuple):
    """A collective whose bytes and runs are symbols."""

    part: str
    """layer, embedding, positions, norm, head, loss, hop, gradients or weights."""
    kind: str
    axes: tuple[str, ...]
    """The mesh axes that a group spans, if they have more than one device."""
    size: str
    """The payload's symbol (`sizes.SYMBOLS`), which has the type, too."""
    count: int
    """Runs in each `per`."""
    per: Per
    why: str
    needed: float = 1.0
    """Part of the wire bytes that the strategy cannot do without."""
    excess: str = ""
    """Why the design sends more than that."""
    share: float = 1.0
    """Part of the layers that have it."""


class Group(NamedTuple):
    """Makes the forms of one part of the model, over the devices along some mesh axes."""

    part: str
    axes: tuple[str, ...]

    def all_gather(
        self, size: str, count: int, per: Per, why: str, needed: float = 1.0, excess: str = ""
    ) -> Form:
        """Returns the form of an all-gather."""
        return Form(self.part, AG, self.axes, size, count, per, why, needed, excess)

    def reduce_scatter(
        self, size: str, count: int, per: Per, why: str, needed: float = 1.0, excess: str = ""
    ) -> Form:
        """Returns the form of a reduce-scatter."""
        return Form(self.part, RS, self.axes, size, count, per, why, needed, excess)

    def all_reduce(
        self, size: str, count: int, per: Per, why: str, needed: float = 1.0, excess: str = ""
    ) -> Form:
        """Returns the form of an all-reduce."""
        return Form(self.part, AR, self.axes, size, count, per, why, needed, excess)

    def all_to_all(self, size: str, count: int, per: Per, why: str) -> Form:
        """Returns the form of an all-to-all, of which nothing is in vain."""
        return Form(self.part, A2A, self.axes, size, count, per, why)

    def permute(
        self, size: str, count: int, per: Per, why: str, needed: float = 1.0, excess: str = ""
    ) -> Form:
        """Returns the form of a collective-permute."""
        return Form(self.part, CP, self.axes, size, count, per, why, needed, excess)


@dataclasses.dataclass(frozen=True)
class Term:
    """One collective of the step, with its bytes and the times it runs."""

    part: str
    kind: str
    axes: tuple[str, ...]
    ways: int
    """Devices in one group."""
    dtype: str
    size: str
    payload: float
    """Bytes of one run on one device: of an all-gather its result, of a reduce-scatter its operand,
    of any other the array."""
    count: int
    per: Per
    times: int
    """Runs in the step."""
    why: str
    needed: float = 1.0
    excess: str = ""

    @property
    def payload_bytes(self) -> float:
        """The payload of all runs."""
        return self.times * self.payload

    @property
    def wire_bytes(self) -> float:
        """What a device of a ring sends: (n - 1) / n of the payload, twice that for an all-reduce,
        all of it for a permute.
        """
        if self.kind == CP:
            return self.payload_bytes
        passes = 2 if self.kind == AR else 1
        return self.payload_bytes * passes * (self.ways - 1) / self.ways

    @property
    def least_wire_bytes(self) -> float:
        """The wire bytes that the strategy cannot do without."""
        return self.needed * self.wire_bytes


def total(terms: Iterable[Term], axis: str = "", field: str = "wire_bytes") -> float:
    """Returns bytes per device and step.

    axis: only of groups that span it, if it is given. A group over two axes counts for both.
    """
    return sum(getattr(term, field) for term in terms if not axis or axis in term.axes)


def by_axes(terms: Iterable[Term], field: str = "wire_bytes") -> dict[tuple[str, ...], float]:
    """Returns bytes per device and step by the mesh axes that a group spans."""
    bytes_by_axes: dict[tuple[str, ...], float] = {}
    for term in terms:
        bytes_by_axes[term.axes] = bytes_by_axes.get(term.axes, 0) + getattr(term, field)
    return bytes_by_axes
