"""`mesh-lm train FILE`, or `python train.py --config=FILE`: trains the run of a config.

With --plan it only shows what would happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_lm.commands.plan_options import Plan, parse_either
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.ready import require_ready


def parse(argv: Sequence[str], prog: str = "train.py") -> tuple[Plan | None, TrainConfig]:
    """Returns the plan on the command line, None without --plan, and the run."""
    return parse_either(argv, prog)


def run(
    arguments: tuple[Plan | None, TrainConfig], train: Callable[[TrainConfig], int] | None = None
) -> int:
    """Returns the status: 0, 99 if SIGTERM ended the run, 130 if Ctrl-C did; of a plan, see `show`.

    train: trains a run and returns its status; None: as `mesh_lm.train`. Raises ConfigError for a
    config that cannot run.
    """
    plan, config = arguments
    if plan:
        # Imported here, so that a mistake in the arguments is answered before Flax is imported.
        from mesh_lm.commands.plan import show

        return show(plan, config)
    try:
        require_ready(config)
    except ConfigError:
        # This names the other mistakes, too, for which it must import Flax.
        require_ready(config, thorough=True)
        raise
    if train:
        return train(config)
    from mesh_lm.training import loop

    return loop.train(config).status


def main(argv: Sequence[str]) -> int:
    """Runs the words of a command line. Returns the status of `run`."""
    return run(parse(argv))
