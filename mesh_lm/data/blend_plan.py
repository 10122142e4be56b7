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
    former_members: tuple[MemberProgress, ...] = ()
    """Members of earlier blends, kept in case they return."""
    changed: tuple[str, ...] = ()
    """Messages about what changed since the plan was saved."""

    def state(self, consumed: Sequence[int]) -> dict[str, Any]:
        """Returns JSON for a checkpoint; consumed: samples drawn from each member so far."""
        members = []
        for member, n in zip(self.members, consumed, strict=True):
            members.append(dataclasses.asdict(member) | {"consumed_now": n})
        return {
            "start": self.start,
            "weights": self.weights,
            "members": members,
            "left": [dataclasses.asdict(member) for member in self.former_members],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> BlendPlan:
        """Returns the plan that `state` describes."""
        weights = None if state["weights"] is None else tuple(state["weights"])
        members = tuple(map(_member, state["members"]))
        return cls(
            state["start"], weights, members, former_members=tuple(map(_member, state["left"]))
        )


def _member(state: dict[str, Any]) -> MemberProgress:
    orders = tuple(state["orders"])
    return MemberProgress(state["prefix"], state["fingerprint"], state["consumed"], orders)


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
    plan = BlendPlan(
        start=0,
        weights=None if weights is None else tuple(weights),
        members=tuple(MemberProgress(*member) for member in members),
    )
    if saved:
        plan = _continued(plan, saved, position)

    # Append an order to each member that needs more samples than its orders have.
    n_needed = blend.sizes(plan.weights, epoch_sizes, max(0, n_samples - plan.start))
    progress = []
    for i, (member, n) in enumerate(zip(plan.members, n_needed, strict=True)):
        n_ordered = sum(order_size(i, n_requested) for n_requested in member.orders)
        n_lacking = member.consumed + n - n_ordered
        if n_lacking > 0 or not member.orders:
            member = dataclasses.replace(member, orders=(*member.orders, n_lacking))
        progress.append(member)
    return dataclasses.replace(plan, members=tuple(progress))


def _continued(plan: BlendPlan, saved: dict[str, Any], position: int) -> BlendPlan:
    """Returns the plan with the progress of the saved one."""
    old = _with_present_seals(BlendPlan.restored(saved), plan)
    is_same = old.weights == plan.weights and (
        [member.fingerprint for member in old.members]
        == [member.fingerprint for member in plan.members]
    )
    if is_same:
        progress = []
        for member, old_member in zip(plan.members, old.members, strict=True):
            progress.append(dataclasses.replace(old_member, prefix=member.prefix))
        return dataclasses.replace(old, members=tuple(progress))

    old_members = []
    for member, state in zip(old.members, saved["members"], strict=True):
        old_members.append(dataclasses.replace(member, consumed=state["consumed_now"]))
    member_by_fingerprint = {
        member.fingerprint: member for member in (*old.former_members, *old_members)
    }
    progress = []
    messages = [f"data.blend: a new blend from position {position}"]
    for member in plan.members:
        member = dataclasses.replace(
            member_by_fingerprint.get(member.fingerprint, member), prefix=member.prefix
        )
        progress.append(member)
        if member.consumed:
            messages.append(f"{member.prefix} continues after {member.consumed:,} samples")
        else:
            messages.append(f"{member.prefix} is new")
    current = {member.fingerprint for member in plan.members}
    absent = tuple(
        member for member in member_by_fingerprint.values() if member.fingerprint not in current
    )
    for member in old_members:
        if member in absent:
            messages.append(f"{member.prefix} left after {member.consumed:,} samples")
    return BlendPlan(position, plan.weights, tuple(progress), absent, tuple(messages))


def _with_present_seals(old: BlendPlan, plan: BlendPlan) -> BlendPlan:
    """Returns the old plan with the present fingerprints of data that were sealed, or lost their
    seal, since it was saved.
    """
    fingerprints = [member.fingerprint for member in plan.members]

    def updated(member: MemberProgress) -> MemberProgress:
        if member.fingerprint in fingerprints:
            return member
        sampled, _, seal = member.fingerprint.partition("-")
        for fingerprint in fingerprints:
            new_sampled, _, new_seal = fingerprint.partition("-")
            if new_sampled == sampled and not (seal and new_seal):
                return dataclasses.replace(member, fingerprint=fingerprint)
        return member

    return dataclasses.replace(
        old,
        members=tuple(map(updated, old.members)),
        former_members=tuple(map(updated, old.former_members)),
    )
