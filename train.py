"""Trains (or plans, with --plan): python train.py --config=configs/gpt_tiny.py [--train.steps=9]"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_lm.commands.main import door

if TYPE_CHECKING:
    from mesh_lm.config import TrainConfig


def train(config: TrainConfig) -> int:
    """Returns the status: 0, 99 if SIGTERM ended the run and 130 if Ctrl-C did, after a save."""
    # Imported here, so that a mistake in the arguments is answered before JAX is imported.
    from mesh_lm.distributed import StopOnSignal
    from mesh_lm.optim import Optimizer
    from mesh_lm.parallel.layout import ModelLayout
    from mesh_lm.training.loop import loop, open_session, start
    from sharding_rules import Shard, make_mesh

    with StopOnSignal() as stop:
        config = start(config, stop.phases)  # checks disk and data, connects, checks the config
        shard = Shard(config.rules, make_mesh(config.mesh))
        layout = ModelLayout.of(config.model, shard, config.pipeline)
        optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
        with open_session(config, layout, optimizer, stop) as session:  # state, data, checkpoints
            loop(session)
    return session.run.status


def main(argv: list[str]) -> int:
    """Returns the status. Raises ConfigError for what cannot run."""
    from mesh_lm.commands import train as command

    return command.run(command.parse(argv), train)


if __name__ == "__main__":
    door("train", train=train)
