"""What a run reads from each member of its blend, and how that goes on when the blend changes at a resume.

The rule. Every member has its own order, and a run remembers how much of it is consumed. When members or weights change, the new blend
begins at the position of the change: its sample 0 is the next one of the run, and each member goes on where it stopped, one that was absent
for a while too. When a member is to give more than its order holds (a longer run, a larger weight), the order is finished first, and
another one with the next seed is appended for what is lacking. So within an epoch no sample is skipped, and none is seen twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mesh_lm.data import blend


@dataclasses.dataclass(frozen=True)
class MemberProgress:
    """One member of a blend."""

    prefix: str
    """As the config names it; it may move."""
    fingerprint: str
    """Which data it is."""
    consumed: int = 0
    """Samples that it gave before the plan's start."""
    orders: tuple[int, ...] = ()
    """Samples that each of its appended orders was asked for."""


@dataclasses.dataclass(frozen=True)
class BlendPlan:
    """One blend from one position on."""

    start: int
    weights: tuple[float, ...] | None
    """Normalized; None: the members' sizes."""
    members: tuple[MemberProgress, ...]
    left: tuple[MemberProgress, ...] = ()
    """Members of earlier blends, should they come back."""
    changed: tuple[str, ...] = ()
    """What is not as it was saved, in words."""

    def state(self, consumed: Sequence[int]) -> dict[str, Any]:
        """JSON for a checkpoint; consumed: samples that each member has given by now."""
        members = [dataclasses.asdict(share) | {"consumed_now": n} for share, n in zip(self.members, consumed, strict=True)]
        return {"start": self.start, "weights": self.weights, "members": members, "left": [dataclasses.asdict(s) for s in self.left]}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> BlendPlan:
        """What `state` came from."""
        weights = None if state["weights"] is None else tuple(state["weights"])
        members, left = ([_member(share) for share in state[name]] for name in ("members", "left"))
        return cls(state["start"], weights, tuple(members), tuple(left))


def _member(state: dict[str, Any]) -> MemberProgress:
    return MemberProgress(state["prefix"], state["fingerprint"], state["consumed"], tuple(state["orders"]))


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
    """The plan of a run that reads positions up to n_samples.

    Args:
      members: (prefix, fingerprint) of each.
      weights: normalized, or None.
      epoch_sizes: samples in one epoch of each member.
      order_size: (member, samples asked for) -> samples of that order.
      saved: `BlendPlan.state` of the run that is resumed, at `position`.
    """
    now = None if weights is None else tuple(weights)
    plan = BlendPlan(0, now, tuple(MemberProgress(*member) for member in members))
    if saved:
        before = BlendPlan.restored(saved)
        if before.weights == now and [share.fingerprint for share in before.members] == [fingerprint for _, fingerprint in members]:
            plan = dataclasses.replace(plan, start=before.start, left=before.left, members=_renamed(before.members, members))
        else:
            consumed = [share["consumed_now"] for share in saved["members"]]
            plan = _changed(before, consumed, members, now, position)
    needed = blend.sizes(plan.weights, epoch_sizes, max(0, n_samples - plan.start))
    shares = []
    for i, (share, n) in enumerate(zip(plan.members, needed, strict=True)):
        lacking = share.consumed + n - sum(order_size(i, asked) for asked in share.orders)
        shares.append(dataclasses.replace(share, orders=(*share.orders, lacking)) if lacking > 0 or not share.orders else share)
    return dataclasses.replace(plan, members=tuple(shares))


def _renamed(shares: Sequence[MemberProgress], members: Sequence[tuple[str, str]]) -> tuple[MemberProgress, ...]:
    return tuple(dataclasses.replace(share, prefix=prefix) for share, (prefix, _) in zip(shares, members, strict=True))


def _changed(
    before: BlendPlan, consumed: Sequence[int], members: Sequence[tuple[str, str]], weights: tuple[float, ...] | None, position: int
) -> BlendPlan:
    gone = [dataclasses.replace(share, consumed=n) for share, n in zip(before.members, consumed, strict=True)]
    known = {share.fingerprint: share for share in (*before.left, *gone)}
    shares = [
        dataclasses.replace(known.get(fingerprint, MemberProgress(prefix, fingerprint)), prefix=prefix) for prefix, fingerprint in members
    ]
    here = {share.fingerprint for share in shares}
    left = tuple(share for share in known.values() if share.fingerprint not in here)
    words = [f"{share.prefix} goes on after {share.consumed:,} samples" if share.consumed else f"{share.prefix} is new" for share in shares]
    words += [f"{share.prefix} left after {share.consumed:,} samples" for share in gone if share in left]
    return BlendPlan(position, weights, tuple(shares), left, (f"data.blend: a new blend from position {position} on", *words))
