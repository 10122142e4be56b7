"""Contradictions of the settings by which a run finds errors and recovers from them: node-local
checkpoints, rollbacks, replayed steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig


def recovery_problems(config: TrainConfig) -> Iterator[str]:
    """Yields the contradictions, each with what would work."""
    policy = config.checkpoint
    health = config.health
    if health.rewinds and policy.keep < 2:
        yield (
            f"health.rewinds={health.rewinds} needs checkpoint.keep=2 or more: the newest "
            "checkpoint may be from the bad steps"
        )
    if health.replay_every > 0 and not config.launch.deterministic:
        yield (
            f"health.replay_every={health.replay_every} needs launch.deterministic=True: without "
            "it, two runs of one step may differ in bits on a GPU"
        )
    if policy.local_every > 0 and not policy.local:
        yield (
            f"checkpoint.local_every={policy.local_every} needs checkpoint.local, a directory on "
            "each node's own disk"
        )
    if policy.local and policy.local_every == 0:
        yield (
            f"checkpoint.local={policy.local} is unused; set checkpoint.local_every to the steps "
            "between two saves"
        )
    if policy.local_copies and not (policy.local and policy.local_every):
        yield (
            f"checkpoint.local_copies={policy.local_copies} copies local checkpoints; set "
            "checkpoint.local and checkpoint.local_every"
        )
    if "://" in policy.local:
        yield f"checkpoint.local={policy.local} must be a directory, on each node's own disk"
    if policy.local_every > 0 and policy.every > 0 and policy.local_every % policy.every == 0:
        yield (
            f"checkpoint.local_every={policy.local_every} is a multiple of "
            f"checkpoint.every={policy.every}, and those steps are saved to the output; set it "
            f"below {policy.every}"
        )
