"""Everything that may happen after a training step: `PostStep`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import jax

from mesh_lm import distributed
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.data.batches import Batches
from mesh_lm.distributed.phases import Phases
from mesh_lm.parallel.engine import evaluate
from mesh_lm.state import State, weights_of
from mesh_lm.training.evaluation import mean_loss
from mesh_lm.training.monitor import Monitor
from mesh_lm.training.one_program import compared
from mesh_lm.training.replicas import require_equal
from mesh_lm.training.run import Run
from mesh_lm.training.skip_guard import SkipGuard


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
