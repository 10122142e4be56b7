"""What surrounds the training loop: `start` connects the processes and checks the config,
`open_session` makes the state, the data and everything else that a run needs, and ends the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import jax

from mesh_lm import distributed
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.checkpoint.reader import SavedCheckpoint
from mesh_lm.config import TrainConfig
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.data.dataset import Dataset
from mesh_lm.data.epochs import epochs_problems
from mesh_lm.data.loader import Batch
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.distributed.phases import Phases
from mesh_lm.errors import ConfigError, listed
from mesh_lm.inference.trained import keep_tokenizer, require_tokenizer, weights
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.report.run_log import RunLog
from mesh_lm.state import State
from mesh_lm.state.disk_form import complete_weights
from mesh_lm.state.initial import fresh_state, init_state
from mesh_lm.training import diloco, elastic, own_kernels
from mesh_lm.training.check import check
from mesh_lm.training.evaluation import sample
from mesh_lm.training.host_room import require_host_memory
from mesh_lm.training.monitor import Monitor
from mesh_lm.training.one_program import compared
from mesh_lm.training.post_step import PostStep
from mesh_lm.training.ready import require_ready
from mesh_lm.training.replay import ReplayedStep
from mesh_lm.training.run import Run
from mesh_lm.training.step import Step, train_step
from mesh_lm.training.watchdog import Watchdog


class Session(NamedTuple):
    """What the training loop works with."""

    run: Run
    step: Step
    outer_step: Callable[[State], State]
    """DiLoCo's, made every diloco.outer_steps steps."""
    batches: Iterator[tuple[int, Batch]]
    """Each with the data position after it."""
    post_step: PostStep


def start(config: TrainConfig, phases: Phases, *, data: Dataset | None = None) -> TrainConfig:
    """Connects the processes of the run, and returns its config, checked and fitted to their
    devices.

    data: what the run was given instead of what the config names. Raises ConfigError with all
    problems at once.
    """
    require_ready(config, data, thorough=True)
    distributed.start(config, phases=phases)
    examined_kernels = own_kernels.examine(config)
    config = check(elastic.fit(config), jax.device_count())
    own_kernels.agree(config, examined_kernels)
    return config


@contextmanager
def open_session(
    config: TrainConfig,
    layout: ModelLayout,
    optimizer: Optimizer,
    stop: distributed.StopOnSignal,
    *,
    dataset: Dataset | None = None,
    callbacks: Sequence[Any] = (),
) -> Iterator[Session]:
    """Yields the session of a run, which continues from its newest intact checkpoint if there is
    one. When the loop has ended, measures the held-out loss, draws a plot and writes a text.

    dataset: what the run was given instead of what the config names.
    """
    phases = stop.phases
    require_host_memory(layout, optimizer)
    jitted_step = train_step(
        layout,
        optimizer,
        config.seed,
        config.health.outlier,
        has_noise_scale=config.train.noise_scale,
    )
    step: Step = compared("the training step", jitted_step)
    outer_step = compared("the outer step", diloco.outer_step(layout, optimizer))
    with (
        Watchdog(config.health, phases, distributed.log_prefix()),
        RunLog(distributed.print_on_process0, speaks=jax.process_index() == 0) as log,
        Checkpoints(config, phases, log.say) as checkpoints,
    ):
        # The checkpoint is restored onto this run's mesh, whatever mesh wrote it.
        saved, state = checkpoints.restore(layout, optimizer)
        read_weights = None
        if config.init_from and not saved:
            read_weights = weights(config.init_from, layout)
        phases.at("data")
        data = _open_data(config, dataset, layout, saved, log)
        if read_weights:
            tokenizer = data.corpus.tokenizer()
            if tokenizer:
                require_tokenizer(config.init_from, tokenizer)
        if state is None and read_weights:
            state = fresh_state(layout, optimizer, read_weights())
        elif state is None:
            state = init_state(layout, optimizer, config.seed)
        run = Run(config, layout, optimizer, saved.step if saved else 0, state)

        with distributed.collective_errors():
            tokenizer = keep_tokenizer(config.output, data.corpus.tokenizer(), config.init_from)
            is_restart = log.open(checkpoints.directory.parent)
            monitor = Monitor(config, layout, data.corpus, phases, run.step, log)
        with monitor, closing(data.batches.train()) as batches:
            if saved:
                monitor.note(_resumed(saved, run, data.batches))
            elif is_restart:
                monitor.note(f"no checkpoint yet: starts at step 0{_first_save(config)}")
            if not data.batches.has_heldout:
                off = "the data has no held-out part: evaluation is off"
                monitor.note("; ".join(filter(None, [off, data.corpus.why_no_heldout])))
            if config.health.replay_every:
                step = ReplayedStep(step, config.health.replay_every, run, monitor)
            post_step = PostStep(run, checkpoints, data.batches, monitor, phases, stop, callbacks)
            post_step.call("on_start")
            first_step = run.step
            yield Session(run, step, outer_step, phases.steps(batches), post_step)
            if not run.preempted and post_step.last_evaluation():
                _finish(run, monitor, tokenizer, has_trained=run.step > first_step)
                post_step.call("on_end")


class _Data(NamedTuple):
    corpus: Dataset
    batches: Batches


def _open_data(
    config: TrainConfig,
    dataset: Dataset | None,
    layout: ModelLayout,
    saved: SavedCheckpoint | None,
    log: RunLog,
) -> _Data:
    """Returns the data and its batches, from the checkpoint's data position, which is one number.

    dataset: what the run was given instead of what the config names.
    """
    with distributed.collective_errors(), distributed.process0_first("data"):
        corpus = dataset
        if corpus is None:
            corpus = prepare(
                config.data,
                vocab=config.data.tokenizer_vocab,
                model_vocab=config.model.vocab_size,
                progress=log.say,
                outputs=config.outputs.values(),
                # The name that `Batches` has given it.
                checkpoint_corpus=str(saved.data["corpus"]).partition(" in ")[0] if saved else "",
            )
        problems = epochs_problems(config, corpus.sources())
        if problems and not saved:
            raise ConfigError(listed("this run cannot start", problems))
        if saved and saved.step < config.train.steps:
            for problem in problems:
                log.say(f"warning: {problem}")  # a run that has begun is not given up
        batches = Batches(
            config,
            corpus,
            batch_sharding(layout),
            saved.data if saved else None,
            saved.step if saved else 0,
            saved_config=saved.config if saved and dataset is None else None,
        )
    fix = "give them the same files, and an output on a disk that they share"
    distributed.assert_equal_across_processes("the data", str(batches.state(batches.position)), fix)
    return _Data(corpus, batches)


def _finish(run: Run, monitor: Monitor, tokenizer: Tokenizer | None, *, has_trained: bool) -> None:
    """Draws the plot and writes a generated text, unless an earlier process has done so."""
    n_tokens = run.config.train.sample_tokens if tokenizer else 0
    if not has_trained:
        is_done = monitor.has_finished(has_sample=n_tokens > 0)
        if distributed.broadcast_from_process0(is_done):
            return
    text = None
    if tokenizer and n_tokens:
        # Takes the weights: the state of a model with pipeline stages is empty afterwards.
        params = complete_weights(run.layout, run.state)
        text = sample(run.layout, params, tokenizer, n_tokens, run.config.seed)
    monitor.finish(text)


def _resumed(saved: SavedCheckpoint, run: Run, batches: Batches) -> str:
    """Returns a message: where the run resumes, or that it is finished, and what changed since the
    checkpoint was saved.
    """
    changed = saved.changed(run.config)
    lines = []
    for change in changed:
        rates = _changed_rates(saved, run, changed) if change.startswith("train.steps: ") else ""
        lines.append(f"\n  changed since: {change}{rates}")
    lines += [f"\n  changed since: {change}" for change in batches.changed]
    changes = "".join(lines)
    if run.unfinished:
        return f"resumed at step {run.step} ({saved.certificate}){changes}"
    return (
        f"already finished (step {run.step} of {run.config.train.steps}): nothing to do; raise "
        f"train.steps to train on ({saved.certificate}){changes}"
    )


def _changed_rates(saved: SavedCheckpoint, run: Run, changed: list[str]) -> str:
    """Returns a clause with the next step's learning rate if another train.steps has changed it;
    empty if it has not.
    """
    if not run.unfinished or any(change.startswith("optimizer.") for change in changed):
        return ""
    saved_steps = saved.config["train"]["steps"]
    saved_optimizer = dataclasses.replace(run.optimizer, steps=saved_steps)
    old_rate = f"{float(saved_optimizer.learning_rate(run.step)):.2e}"
    new_rate = f"{float(run.optimizer.learning_rate(run.step)):.2e}"
    if new_rate == old_rate:
        return ""
    return f" (the learning rate at step {run.step + 1} is {new_rate}, was {old_rate})"


def _first_save(config: TrainConfig) -> str:
    every = config.checkpoint.every
    if 0 < every < config.train.steps:
        return f"; the first is saved after step {every}"
    return "; one is saved at the end"
