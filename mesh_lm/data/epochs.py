"""How often a run would read its training text, and the limit on that, `data.max_epochs`."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_lm.config import TrainConfig

Sources = Mapping[str, tuple[int, float]]
"""Name of a source of text -> (its training tokens, its share of the run's samples)."""


def epochs_problems(config: TrainConfig, sources: Sources) -> list[str]:
    """Returns a message for each source that the whole run would read more than data.max_epochs
    times.

    A weighted blend repeats a small prefix while a large one is not half read, so each source has
    the limit for itself.
    """
    limit, train = config.data.max_epochs, config.train
    if not limit:
        return []
    wanted = train.steps * config.tokens_per_step
    shown = f"train.steps={train.steps} x {config.tokens_per_step:,} tokens a step"
    steps = min(
        (
            int(limit * tokens / (share * config.tokens_per_step))
            for tokens, share in sources.values()
        ),
        default=0,
    )
    fix = (
        "give it more text, "
        + (f"set train.steps={steps} or fewer, " if steps else "")
        + "or set data.max_epochs=0 for no limit"
    )
    lines = []
    for name, (tokens, share) in sources.items():
        if wanted * share > limit * tokens:
            asked = f"{shown} are {wanted:,}" + (
                "" if share == 1 else f", of which {round(share * wanted):,}"
            )
            epochs = (
                f"{share * wanted / tokens:,.1f} epochs of its {tokens:,} tokens"
                if tokens
                else "it has no tokens"
            )
            lines.append(
                f"{asked} from {name}: {epochs}, more than data.max_epochs={limit:g}; {fix}"
            )
    return lines
