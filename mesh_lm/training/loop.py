"""A complete training run. The training loop is `loop`; everything that may happen between two of
its steps is in `Between`.

Every object that a run needs is made here, once, and passed down. There is no global state and no
branch per strategy: how a run is parallel is in its mesh and its rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any

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
from mesh_lm.training import elastic, own_kernels
from mesh_lm.training.check import check
from mesh_lm.training.diloco import outer_step
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
    outer: Callable[[State], State],
    batches: Iterator[tuple[int, Batch]],
    between: Between,
) -> None:
    """Trains until the run has made all its steps, or is stopped."""
    state = run.state
    while run.unfinished:
        position, batch = next(batches)
        state, metrics = step(state, batch)
        run.step += 1
        if (every := run.config.optimizer.outer_steps) and run.step % every == 0:
            state = outer(state)
        state = between(state, metrics, position)


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
    data: Dataset | None,
    callbacks: Sequence[Any],
    phases: Phases,
    stop: distributed.StopOnSignal,
) -> Run:
    # 1. A config that cannot run stops here, with all problems at once.
    section, rule = own_rule(config.optimizer, optimizer) if optimizer else (config.optimizer, None)
    config = dataclasses.replace(config, optimizer=section)
    require_ready(config, data, rule=rule, thorough=True)
    distributed.start(config, phases=phases)
    examined = own_kernels.examine(config)
    config = check(elastic.fit(config, rule=rule), jax.device_count(), rule)
    own_kernels.agree(config, examined)

    # 2. Mesh and rules, bound into the one object through which the model uses sharding. Only
    # shapes and shardings; nothing is allocated.
    layout = ModelLayout.of(
        config.model, Shard(config.rules, make_mesh(config.mesh)), config.pipeline
    )
    update = Optimizer(config.optimizer, config.train.steps, rule)
    step: Step = compared(
        "the training step", train_step(layout, update, config.seed, config.health.outlier)
    )
    outer = compared("the outer step", outer_step(layout, update))

    with (
        Watchdog(config.health, phases, distributed.log_prefix()),
        RunLog(distributed.print_on_process0, speaks=jax.process_index() == 0) as log,
        Checkpoints(config, phases, log.say) as checkpoints,
    ):
        # 3. State and data: the newest intact checkpoint, restored onto this run's mesh, if there
        # is one.
        saved, restored = checkpoints.restore(layout, update)
        read = weights(config.init_from, layout) if config.init_from and not saved else None
        phases.at("data")
        corpus, batches = _data(config, data, layout, saved, log)
        if read and (tokenizer := corpus.tokenizer()):
            require_tokenizer(config.init_from, tokenizer)
        if restored is None:
            restored = (
                fresh_state(layout, update, read())
                if read
                else init_state(layout, update, config.seed)
            )
        run = Run(config, layout, update, saved.step if saved else 0, restored)

        # 4. The loop, and then the held-out loss, a plot and a text.
        with distributed.collective_errors():
            tokenizer = keep_tokenizer(config.output, corpus.tokenizer(), config.init_from)
            restarted = log.open(checkpoints.directory.parent)
            monitor = Monitor(config, layout, corpus, phases, run.step, log)
        with monitor, closing(batches.train()) as training:
            if saved:
                monitor.note(_resumed(saved, run, batches))
            elif restarted:
                monitor.note(f"no checkpoint yet: starts at step 0{_first_save(config)}")
            if every := config.health.replay_every:
                step = ReplayedStep(step, every, run, monitor)
            between = Between(run, checkpoints, batches, monitor, phases, stop, callbacks)
            if not batches.has_heldout:
                monitor.note(
                    "; ".join(
                        filter(
                            None,
                            [
                                "the data has no held-out part: evaluation is off",
                                corpus.why_no_heldout,
                            ],
                        )
                    )
                )
            between.call("on_start")
            begun = run.step
            loop(run, step, outer, phases.steps(training), between)
            if not run.preempted and between.last_evaluation():
                n_tokens = config.train.sample_tokens if tokenizer else 0
                if run.step > begun or not distributed.broadcast_from_process0(
                    monitor.has_finished(with_sample=n_tokens > 0)
                ):
                    final = complete_weights(layout, run.state) if n_tokens else {}
                    monitor.finish(
                        sample(layout, final, tokenizer, n_tokens, config.seed)
                        if tokenizer and n_tokens
                        else None
                    )
                between.call("on_end")
    return run


def _data(
    config: TrainConfig,
    given: Dataset | None,
    layout: ModelLayout,
    saved: SavedCheckpoint | None,
    log: RunLog,
) -> tuple[Dataset, Batches]:
    """Returns the data and its batches, from the checkpoint's data position, which is one
    number.
    """
    with distributed.collective_errors(), distributed.process0_first("data"):
        vocab, model_vocab = config.data.tokenizer_vocab, config.model.vocab_size
        outputs = config.outputs.values()
        # as `Batches` names it
        trained_on = str(saved.data["corpus"]).partition(" in ")[0] if saved else ""
        corpus = given or prepare(
            config.data,
            vocab=vocab,
            model_vocab=model_vocab,
            progress=log.say,
            outputs=outputs,
            trained_on=trained_on,
        )
        problems = epochs_problems(config, corpus.sources())
        if problems and not saved:
            raise ConfigError(listed("this run cannot start", problems))
        for problem in problems if saved and saved.step < config.train.steps else []:
            log.say(f"warning: {problem}")  # a run that has begun is not given up
        place = (saved.data, saved.step) if saved else (None, 0)
        batches = Batches(
            config,
            corpus,
            batch_sharding(layout),
            *place,
            saved_config=saved.metadata["config"] if saved and not given else None,
        )
    fix = "give them the same files, and an output on a disk that they share"
    distributed.assert_equal_across_processes("the data", str(batches.state(batches.position)), fix)
    return corpus, batches


def _resumed(saved: SavedCheckpoint, run: Run, batches: Batches) -> str:
    """Returns a message: where the run resumes, or that it is finished, and what changed since the
    checkpoint was saved.
    """
    changed = saved.changed(run.config)
    changed = [
        change + _rates(saved, run, changed) * change.startswith("train.steps: ")
        for change in changed
    ]
    changes = "".join(f"\n  changed since: {change}" for change in [*changed, *batches.changed])
    if run.unfinished:
        return f"resumed at step {run.step} ({saved.certificate}){changes}"
    done = (
        f"already finished (step {run.step} of {run.config.train.steps}): nothing to do; raise "
        "train.steps to train on"
    )
    return f"{done} ({saved.certificate}){changes}"


def _rates(saved: SavedCheckpoint, run: Run, changed: list[str]) -> str:
    """Returns a clause with the next step's learning rate if another train.steps has changed it;
    empty if it has not.
    """
    if not run.unfinished or any(change.startswith("optimizer.") for change in changed):
        return ""
    before = dataclasses.replace(run.optimizer, steps=saved.metadata["config"]["train"]["steps"])
    now, was = (
        f"{float(optimizer.learning_rate(run.step)):.2e}" for optimizer in (run.optimizer, before)
    )
    return "" if now == was else f" (the learning rate at step {run.step + 1} is {now}, was {was})"


def _first_save(config: TrainConfig) -> str:
    every = config.checkpoint.every
    return (
        f"; the first is saved after step {every}"
        if 0 < every < config.train.steps
        else "; one is saved at the end"
    )


class Between:
    """The work between two steps: skipped steps and rollbacks, the user's callbacks, signals,
    saving, evaluation.
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
        self._run, self._checkpoints, self._batches, self._monitor = (
            run,
            checkpoints,
            batches,
            monitor,
        )
        self._phases, self._stop, self._callbacks = phases, stop, callbacks
        self._guard = SkipGuard(run.config.health, monitor.note)
        self._evaluation = compared(
            "the evaluation", jax.jit(evaluate(run.layout, run.layout.flat))
        )
        self._position: int | None = None

    def __call__(self, state: State, metrics: dict[str, jax.Array], position: int) -> State:
        """Call it after a step was dispatched. position: the data position after its batch. Returns
        the state for the next step.
        """
        run, checkpoints = self._run, self._checkpoints
        run.state, n, self._position = state, run.step, position
        # too many skipped steps: roll back, and skip their batches
        if began := self._guard.step(self._monitor.step(n, metrics)):
            return self._roll_back(began)
        self.call("on_step", metrics)
        checkpoints.poll(n)
        last = n == run.config.train.steps or run.stopping
        stopping = self._stop.poll()  # read once: a signal from here on is for the next step
        # During a streak of skipped steps nothing is saved: retention must not delete the
        # checkpoint to roll back to.
        saving = last or stopping or (checkpoints.due(n) and not self._guard.consecutive_skips)
        self._compare_replicas(saving)
        if saving:
            if last or stopping:
                self._monitor.flush()  # the last step's time is its own, without that of the save
            self._save(last=last or stopping)
        if stopping and not last:
            self._monitor.note(
                f"stopped by {self._stop.cause} after step {n}; the same command continues from "
                "there"
            )
            run.preempted = True
            run.interrupted = self._stop.interrupted
        elif (
            not last
            and (every := run.config.train.eval_every)
            and n % every == 0
            and self._batches.has_heldout
        ):
            self._evaluate(n)
        return run.state

    def call(self, hook: str, *about: Any) -> None:
        """Calls the callbacks' methods of this name. If one of them raises, saves the run before
        raising that.
        """
        if not any(hasattr(callback, hook) for callback in self._callbacks):
            return
        before = self._phases.phase
        self._phases.at("evaluate")  # the watchdog gives it health.patience
        try:
            with distributed.collective_errors():
                for callback in self._callbacks:
                    getattr(callback, hook, lambda *about: None)(self._run, *about)
        except Exception:
            self._monitor.flush()
            self._save(last=True)
            raise
        self._phases.at(before)

    def _save(self, *, last: bool) -> None:
        if self._position is not None:  # otherwise this process has made no step
            run, data = self._run, self._batches.state(self._position)
            run.state = self._checkpoints.save(
                run.step, run.state, data, run.layout, run.optimizer, last=last
            )

    def _roll_back(self, before: int) -> State:
        run = self._run
        saved, run.state = self._checkpoints.roll_back(before, run.state, run.layout, run.optimizer)
        run.step = saved.step
        self._monitor.roll_back(saved.step)
        return run.state

    def _compare_replicas(self, saving: bool) -> None:
        every = self._run.config.health.replicas
        if every and (saving or self._run.step % every == 0):
            self._phases.at("evaluate")
            require_equal(self._run.state)

    def _evaluate(self, n: int) -> None:
        """Measures the held-out loss after step n. A signal interrupts it, and then nothing is
        recorded.
        """

        def go_on(batch: object) -> bool:
            self._phases.at("evaluate")
            return not self._stop.poll()

        with self._monitor.paused():
            heldout = takewhile(go_on, self._batches.heldout())
            loss = mean_loss(
                self._evaluation, weights_of(self._run.layout, self._run.state), heldout
            )
        if not self._stop.requested:
            self.call("on_evaluation", self._monitor.heldout(n, loss))

    def last_evaluation(self) -> bool:
        """Evaluates the final weights, unless that is on record or nothing is held out.

        Returns whether it was completed; if not, the run counts as preempted.
        """
        self._phases.at("evaluate")
        step = int(self._run.state["step"])
        if self._batches.has_heldout and not distributed.broadcast_from_process0(
            self._monitor.has_heldout(step)
        ):
            self._evaluate(step)
        self._run.preempted = self._stop.requested
        self._run.interrupted = self._stop.interrupted
        return not self._stop.requested
