"""The position of a run in each member of its blend, and how reading continues if the blend changes
at a resume.

Every member has its own sample order, and a run records how much of it is consumed. When members or
weights change, the new blend starts at the position of the change, and each member continues where
it stopped, including one that was absent for a while. If a member needs more samples than its order
holds (a longer run, a larger weight), an order with the next seed is appended. So within an epoch
no sample is skipped or repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mesh_lm.data import blend


@dataclasses.dataclass(frozen=True)
class MemberProgress:
    """How much of one member of a blend is consumed."""

    prefix: str
    """As the config names it; the files may move."""
    fingerprint: str
    """Identifies the data (`Documents.fingerprint`), with the seal if it had one."""
    consumed: int = 0
    """Samples drawn before the plan's start."""
    orders: tuple[int, ...] = ()
    """Requested samples of each of its appended orders."""


@dataclasses.dataclass(frozen=True)
class BlendPlan:
    """A blend that is used from one position on."""

    start: int
    weights: tuple[float, ...] | None
    """Normalized; None: in proportion to the members' sizes."""
    members: tuple[MemberProgress, ...]
    left: tuple[MemberProgress, ...] = ()
    """Members of earlier blends, kept in case they return."""
    changed: tuple[str, ...] = ()
    """Messages about what changed since the plan was saved."""

    def state(self, consumed: Sequence[int]) -> dict[str, Any]:
        """Returns JSON for a checkpoint; consumed: samples drawn from each member so far."""
        members = [
            dataclasses.asdict(member) | {"consumed_now": n}
            for member, n in zip(self.members, consumed, strict=True)
        ]
        return {
            "start": self.start,
            "weights": self.weights,
            "members": members,
            "left": [dataclasses.asdict(s) for s in self.left],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> BlendPlan:
        """Returns the plan that `state` describes."""
        weights = None if state["weights"] is None else tuple(state["weights"])
        members, left = (
            [_member(member) for member in state[name]] for name in ("members", "left")
        )
        return cls(state["start"], weights, tuple(members), tuple(left))


def _member(state: dict[str, Any]) -> MemberProgress:
    return MemberProgress(
        state["prefix"], state["fingerprint"], state["consumed"], tuple(state["orders"])
    )


def make_plan(
    members: Sequence[tuple[str, str]],
    weights: Sequence[float] | None,
    *,
    n_samples: int,
    epoch_sizes: Sequence[int],
    order_size: Callable[[int, int], int],
    saved: dict[str, Any] | None,
    position: int,
) -> BlendPlan:
    """Returns the plan of a run that reads positions up to n_samples.

    Args:
      members: (prefix, fingerprint) of each member.
      weights: normalized, or None.
      epoch_sizes: samples in one epoch of each member.
      order_size: (member, requested samples) -> samples in that order.
      saved: `BlendPlan.state` of the run that is resumed, at `position`.
    """
    now = None if weights is None else tuple(weights)
    plan = BlendPlan(0, now, tuple(MemberProgress(*member) for member in members))
    if saved:
        before = _as_known_now(
            BlendPlan.restored(saved), [fingerprint for _, fingerprint in members]
        )
        if before.weights == now and [member.fingerprint for member in before.members] == [
            fingerprint for _, fingerprint in members
        ]:
            plan = dataclasses.replace(
                plan,
                start=before.start,
                left=before.left,
                members=_renamed(before.members, members),
            )
        else:
            consumed = [member["consumed_now"] for member in saved["members"]]
            plan = _changed(before, consumed, members, now, position)
    needed = blend.sizes(plan.weights, epoch_sizes, max(0, n_samples - plan.start))
    progress = []
    for i, (member, n) in enumerate(zip(plan.members, needed, strict=True)):
        lacking = member.consumed + n - sum(order_size(i, requested) for requested in member.orders)
        progress.append(
            dataclasses.replace(member, orders=(*member.orders, lacking))
            if lacking > 0 or not member.orders
            else member
        )
    return dataclasses.replace(plan, members=tuple(progress))


def _as_known_now(plan: BlendPlan, fingerprints: Sequence[str]) -> BlendPlan:
    """Returns the plan with the present fingerprints of data that were sealed, or lost their seal,
    since the plan was saved.
    """

    def known(member: MemberProgress) -> MemberProgress:
        if member.fingerprint in fingerprints:
            return member
        sampled, _, sealed = member.fingerprint.partition("-")
        others = (
            found
            for found in fingerprints
            if found.partition("-")[0] == sampled and not (sealed and "-" in found)
        )
        return dataclasses.replace(member, fingerprint=next(others, member.fingerprint))

    return dataclasses.replace(
        plan, members=tuple(map(known, plan.members)), left=tuple(map(known, plan.left))
    )


def _renamed(
    progress: Sequence[MemberProgress], members: Sequence[tuple[str, str]]
) -> tuple[MemberProgress, ...]:
    return tuple(
        dataclasses.replace(member, prefix=prefix)
        for member, (prefix, _) in zip(progress, members, strict=True)
    )


def _changed(
    before: BlendPlan,
    consumed: Sequence[int],
    members: Sequence[tuple[str, str]],
    weights: tuple[float, ...] | None,
    position: int,
) -> BlendPlan:
    previous = [
        dataclasses.replace(member, consumed=n)
        for member, n in zip(before.members, consumed, strict=True)
    ]
    known = {member.fingerprint: member for member in (*before.left, *previous)}
    progress = [
        dataclasses.replace(
            known.get(fingerprint, MemberProgress(prefix, fingerprint)), prefix=prefix
        )
        for prefix, fingerprint in members
    ]
    current = {member.fingerprint for member in progress}
    left = tuple(member for member in known.values() if member.fingerprint not in current)
    messages = [
        f"{member.prefix} continues after {member.consumed:,} samples"
        if member.consumed
        else f"{member.prefix} is new"
        for member in progress
    ]
    messages += [
        f"{member.prefix} left after {member.consumed:,} samples"
        for member in previous
        if member in left
    ]
    return BlendPlan(
        position,
        weights,
        tuple(progress),
        left,
        (f"data.blend: a new blend from position {position}", *messages),
    )
