"""A complete training run. The training loop is `loop`; everything that may happen after one of its
steps is in `PostStep`.

Every object that a run needs is made here, once, and passed down. There is no global state and no
branch per strategy: how a run is parallel is in its mesh and its rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import takewhile
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
from mesh_lm.optim import Optimizer, Rule, own_rule
from mesh_lm.parallel.engine import batch_sharding, evaluate
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.report.run_log import RunLog
from mesh_lm.state import State, weights_of
from mesh_lm.state.disk_form import complete_weights
from mesh_lm.state.initial import fresh_state, init_state
from mesh_lm.training import diloco, elastic, own_kernels
from mesh_lm.training.check import check
from mesh_lm.training.evaluation import mean_loss, sample
from mesh_lm.training.monitor import Monitor
from mesh_lm.training.one_program import compared
from mesh_lm.training.ready import require_ready
from mesh_lm.training.replay import ReplayedStep
from mesh_lm.training.replicas import require_equal
from mesh_lm.training.run import Run, require_callbacks
from mesh_lm.training.skip_guard import SkipGuard
from mesh_lm.training.step import Step, train_step
from mesh_lm.training.watchdog import Watchdog
from sharding_rules import Shard, make_mesh


def loop(
    run: Run,
    step: Step,
    outer_step: Callable[[State], State],
    batches: Iterator[tuple[int, Batch]],
    post_step: PostStep,
) -> None:
    """Trains until the run has made all its steps, or is stopped.

    outer_step: of DiLoCo, made every optimizer.outer_steps steps. batches: each with the data
    position after it.
    """
    state = run.state
    outer_steps = run.config.optimizer.outer_steps
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
    optimizer: Rule | type | None = None,
    data: Dataset | None = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Trains a model, from its newest checkpoint if there is one, and returns the run. See
    `mesh_lm.train`.
    """
    require_callbacks(callbacks)
    phases = Phases()
    with distributed.StopOnSignal(phases) as stop:
        return _train(config, optimizer, data, callbacks, phases, stop)


def _train(
    config: TrainConfig,
    optimizer: Rule | type | None,
    dataset: Dataset | None,
    callbacks: Sequence[Any],
    phases: Phases,
    stop: distributed.StopOnSignal,
) -> Run:
    # 1. A config that cannot run stops here, with all problems at once.
    rule = None
    if optimizer:
        section, rule = own_rule(config.optimizer, optimizer)
        config = dataclasses.replace(config, optimizer=section)
    require_ready(config, dataset, rule=rule, thorough=True)
    distributed.start(config, phases=phases)
    examined_kernels = own_kernels.examine(config)
    config = check(elastic.fit(config, rule=rule), jax.device_count(), rule)
    own_kernels.agree(config, examined_kernels)

    # 2. Mesh and rules, bound into the one object through which the model uses sharding. Only
    # shapes and shardings; nothing is allocated.
    shard = Shard(config.rules, make_mesh(config.mesh))
    layout = ModelLayout.of(config.model, shard, config.pipeline)
    update = Optimizer(config.optimizer, config.train.steps, rule)
    jitted_step = train_step(layout, update, config.seed, config.health.outlier)
    step: Step = compared("the training step", jitted_step)
    outer_step = compared("the outer step", diloco.outer_step(layout, update))

    with (
        Watchdog(config.health, phases, distributed.log_prefix()),
        RunLog(distributed.print_on_process0, speaks=jax.process_index() == 0) as log,
        Checkpoints(config, phases, log.say) as checkpoints,
    ):
        # 3. State and data: from the newest intact checkpoint, restored onto this run's mesh, if
        # there is one.
        saved, state = checkpoints.restore(layout, update)
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
            state = fresh_state(layout, update, read_weights())
        elif state is None:
            state = init_state(layout, update, config.seed)
        run = Run(config, layout, update, saved.step if saved else 0, state)

        # 4. The loop, and then the held-out loss, a plot and a text.
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
            loop(run, step, outer_step, phases.steps(batches), post_step)
            if not run.preempted and post_step.last_evaluation():
                _finish(run, monitor, tokenizer, has_trained=run.step > first_step)
                post_step.call("on_end")
    return run


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
                trained_on=str(saved.data["corpus"]).partition(" in ")[0] if saved else "",
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
            saved_config=saved.metadata["config"] if saved and dataset is None else None,
        )
    fix = "give them the same files, and an output on a disk that they share"
    distributed.assert_equal_across_processes("the data", str(batches.state(batches.position)), fix)
    return _Data(corpus, batches)


def _finish(run: Run, monitor: Monitor, tokenizer: Tokenizer | None, *, has_trained: bool) -> None:
    """Draws the plot and writes a generated text, unless an earlier process has done so."""
    n_tokens = run.config.train.sample_tokens if tokenizer else 0
    if not has_trained:
        is_done = monitor.has_finished(with_sample=n_tokens > 0)
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
    saved_steps = saved.metadata["config"]["train"]["steps"]
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


class PostStep:
    """The work after a step: skipped steps and rollbacks, the user's callbacks, signals, saving,
    evaluation.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        batches: Batches,
        monitor: Monitor,
        phases: Phases,
        stop: distributed.StopOnSignal,
        callbacks: Sequence[Any],
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._batches = batches
        self._monitor = monitor
        self._phases = phases
        self._stop = stop
        self._callbacks = callbacks
        self._skip_guard = SkipGuard(run.config.health, monitor.note)
        evaluation = jax.jit(evaluate(run.layout, run.layout.flat))
        self._evaluation = compared("the evaluation", evaluation)
        self._position: int | None = None

    def __call__(self, state: State, metrics: dict[str, jax.Array], position: int) -> State:
        """Returns the state for the next step. Call it after a step was dispatched.

        position: the data position after its batch.
        """
        run = self._run
        run.state = state
        self._position = position

        # A streak of skipped steps: continue from an older checkpoint, without their batches.
        report = self._monitor.step(run.step, metrics)
        first_skipped = self._skip_guard.step(report)
        if first_skipped is not None:
            return self._roll_back(first_skipped)

        self.call("on_step", metrics)
        self._checkpoints.poll(run.step)
        finished = run.step == run.config.train.steps or run.stopping
        # The signal is read once: one that comes later is for the next step.
        signalled = self._stop.poll()
        ends = finished or signalled
        saving = ends or self._is_save_due()
        self._compare_replicas(saving)
        if saving:
            if ends:
                self._monitor.flush()  # the last step's time is its own, without that of the save
            self._save(last=ends)
        if signalled and not finished:
            self._monitor.note(
                f"stopped by {self._stop.cause} after step {run.step}; the same command continues "
                "from there"
            )
            run.preempted = True
            run.interrupted = self._stop.interrupted
        elif not finished and self._is_evaluation_due():
            self._evaluate(run.step)
        return run.state

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls the callbacks' methods of this name. If one of them raises, saves the run before
        raising that.
        """
        if not any(hasattr(callback, hook) for callback in self._callbacks):
            return
        phase = self._phases.phase
        self._phases.at("evaluate")  # the watchdog gives it health.patience
        try:
            with distributed.collective_errors():
                for callback in self._callbacks:
                    if hasattr(callback, hook):
                        getattr(callback, hook)(self._run, *arguments)
        except Exception:
            self._monitor.flush()
            self._save(last=True)
            raise
        self._phases.at(phase)

    def last_evaluation(self) -> bool:
        """Evaluates the final weights, unless that is on record or nothing is held out.

        Returns whether it was completed; if not, the run counts as preempted.
        """
        self._phases.at("evaluate")
        step = int(self._run.state["step"])
        if self._batches.has_heldout:
            is_on_record = self._monitor.has_heldout(step)
            if not distributed.broadcast_from_process0(is_on_record):
                self._evaluate(step)
        self._run.preempted = self._stop.requested
        self._run.interrupted = self._stop.interrupted
        return not self._stop.requested

    def _is_save_due(self) -> bool:
        # During a streak of skipped steps nothing is saved: retention must not delete the
        # checkpoint to roll back to.
        return self._checkpoints.due(self._run.step) and not self._skip_guard.consecutive_skips

    def _is_evaluation_due(self) -> bool:
        every = self._run.config.train.eval_every
        return bool(every) and self._run.step % every == 0 and self._batches.has_heldout

    def _save(self, *, last: bool) -> None:
        if self._position is None:
            return  # this process has made no step
        run = self._run
        data = self._batches.state(self._position)
        run.state = self._checkpoints.save(
            run.step, run.state, data, run.layout, run.optimizer, last=last
        )

    def _roll_back(self, first_skipped: int) -> State:
        run = self._run
        saved, run.state = self._checkpoints.roll_back(
            first_skipped, run.state, run.layout, run.optimizer
        )
        run.step = saved.step
        self._monitor.roll_back(saved.step)
        return run.state

    def _compare_replicas(self, saving: bool) -> None:
        every = self._run.config.health.replicas
        if every and (saving or self._run.step % every == 0):
            self._phases.at("evaluate")
            require_equal(self._run.state)

    def _evaluate(self, step: int) -> None:
        """Measures the held-out loss after a step. A signal interrupts it, and then nothing is
        recorded.
        """

        def is_undisturbed(batch: object) -> bool:
            self._phases.at("evaluate")
            return not self._stop.poll()

        with self._monitor.paused():
            batches = takewhile(is_undisturbed, self._batches.heldout())
            params = weights_of(self._run.layout, self._run.state)
            loss = mean_loss(self._evaluation, params, batches)
        if not self._stop.requested:
            self.call("on_evaluation", self._monitor.heldout(step, loss))
