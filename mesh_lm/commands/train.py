"""`mesh-lm train FILE`, or `python train.py --config=FILE`: trains what a config describes. With
--plan it only shows what would happen.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_lm.commands.plan_options import Plan, parse_either
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.ready import require_ready


def parse(argv: Sequence[str], prog: str = "train.py") -> tuple[Plan | None, TrainConfig]:
    """The plan that the words ask for, None without --plan, and the run. Raises ConfigError."""
    return parse_either(argv, prog)


def run(asked: tuple[Plan | None, TrainConfig]) -> int:
    """The status: 0, 99 where SIGTERM ended the run, 130 where Ctrl-C did, and of a plan as `show`
    has it.

    Raises ConfigError for what cannot run.
    """
    planned, config = asked
    if planned:
        # here, so that a mistake in the arguments is answered before Flax is imported
        from mesh_lm.commands.plan import show

        return show(planned, config)
    try:
        require_ready(config)
    except ConfigError:
        # it names what else is wrong, for which it must import Flax
        require_ready(config, thorough=True)
        raise
    from mesh_lm.training import loop

    return loop.train(config).status


def main(argv: Sequence[str]) -> int:
    """As `run`, for the words of a command line."""
    return run(parse(argv))
