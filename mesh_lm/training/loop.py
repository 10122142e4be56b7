"""The training loop (`loop`), and a complete run around it (`train`).

Every object that a run needs is made once, and passed down. There is no global state and no branch
per strategy: how a run is parallel is in its mesh and its rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mesh_lm import distributed
from mesh_lm.config import TrainConfig
from mesh_lm.data.dataset import Dataset
from mesh_lm.optim import Optimizer, Rule
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training.run import Run, require_callbacks
from mesh_lm.training.session import Session, open_session, start
from sharding_rules import Shard, make_mesh


def loop(session: Session) -> None:
    """Trains until the run has made all its steps, or is stopped."""
    run, step, outer_step, batches, post_step = session
    state = run.state
    outer_steps = run.config.diloco.outer_steps
    while run.unfinished:
        position, batch = next(batches)
        state, metrics = step(state, batch)
        run.step += 1
        if outer_steps and run.step % outer_steps == 0:
            state = outer_step(state)
        state = post_step(state, metrics, position)


def train(
    config: TrainConfig,
    *,
    optimizer: Rule | None = None,
    data: Dataset | None = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Trains a model, from its newest checkpoint if there is one, and returns the run. See
    `mesh_lm.train`; train.py has the same in its plainest form.
    """
    require_callbacks(callbacks)
    with distributed.StopOnSignal() as stop:
        if optimizer is not None:
            section = dataclasses.replace(config.optimizer, rule=optimizer)
            config = dataclasses.replace(config, optimizer=section)
        config = start(config, stop.phases, data=data)
        # Mesh and rules in the one object through which the model uses sharding; nothing is
        # allocated yet.
        shard = Shard(config.rules, make_mesh(config.mesh))
        layout = ModelLayout.of(config.model, shard, config.pipeline)
        update = Optimizer(config.optimizer, config.train.steps, config.diloco)
        with open_session(
            config, layout, update, stop, dataset=data, callbacks=callbacks
        ) as session:
            loop(session)
    return session.run
