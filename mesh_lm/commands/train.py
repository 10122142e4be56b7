"""mesh-lm train, or python train.py: trains what a config describes, or shows with --plan what the run would do."""

from __future__ import annotations

from mesh_lm.commands import command_line, plan
from mesh_lm.training import loop


def main(argv: list[str]) -> int:
    """The status: 0, 99 where SIGTERM ended the run, and with --plan as `plan.show`. Raises ConfigError for what cannot run."""
    planned, argv = plan.asked(argv)
    config = command_line.parse(argv)
    return plan.show(planned, config) if planned else loop.train(config).status
