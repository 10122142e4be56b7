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
    limit = config.data.max_epochs
    if not limit:
        return []
    train_steps = config.train.steps
    run_tokens = train_steps * config.tokens_per_step
    allowed_steps = []
    for source_tokens, share in sources.values():
        allowed_steps.append(int(limit * source_tokens / (share * config.tokens_per_step)))
    steps = min(allowed_steps, default=0)
    fewer_steps = f"set train.steps={steps} or fewer, " if steps else ""

    problems = []
    for name, (source_tokens, share) in sources.items():
        source_run_tokens = share * run_tokens
        if source_run_tokens <= limit * source_tokens:
            continue
        part = "" if share == 1 else f", of which {round(source_run_tokens):,}"
        epochs = "it has no tokens"
        if source_tokens:
            n_epochs = source_run_tokens / source_tokens
            epochs = f"{n_epochs:,.1f} epochs of its {source_tokens:,} tokens"
        problems.append(
            f"train.steps={train_steps} x {config.tokens_per_step:,} tokens a step are "
            f"{run_tokens:,}{part} from {name}: {epochs}, more than data.max_epochs={limit:g}; "
            f"give it more text, {fewer_steps}or set data.max_epochs=0 for no limit"
        )
    return problems
