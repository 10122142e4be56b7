"""Manages the checkpoints of a run: when to save, what to keep, and how to handle failed saves and
damaged checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from mesh_lm import distributed
from mesh_lm.checkpoint.commit import Commit
from mesh_lm.checkpoint.lease import acquire_on_process0
from mesh_lm.checkpoint.node_local import NodeLocalCheckpoints
from mesh_lm.checkpoint.quiet import quiet, reason
from mesh_lm.checkpoint.reader import (
    FORMAT,
    DamagedCheckpoint,
    SavedCheckpoint,
    array_handler,
    certificate,
    misnamed_in,
    seal,
    state_shapes,
    steps_in,
)
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.distributed.phases import Phases
from mesh_lm.errors import ConfigError, StorageError
from mesh_lm.network.environment import BEGUN
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State
from mesh_lm.state.digest import digests
from mesh_lm.state.disk_form import back, to_disk

ALARM = 3
"""From this number of failed saves in a row on, their lines in the log start with ERROR. Training
continues."""
_POLL_EVERY = 10
"""Steps between checks among processes whether the current save is complete."""
_LAST_TRIES = 4
"""Attempts to save the last step, or the one at which a run is stopped; it would otherwise be
lost."""


class SaveOutcome(enum.IntEnum):
    """The outcome of a save on one process; a number, which processes exchange as JSON."""

    WRITING = 0
    COMPLETE = 1
    FAILED = 2


@dataclasses.dataclass
class _Save:
    """A save that is being written."""

    step: int
    commit: Commit
    error: Exception | None = None
    """The first error on this process."""


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`.

    It is a context manager, which waits for the current save on exit.

    Each step is a directory named after its number. `N.damaged` could not be verified; `N.passed`
    is from steps that the run has rolled back. Both are kept for inspection. Process 0 holds the
    lease of the output (`mesh_lm.checkpoint.lease`), and gives a save its name only while it does;
    until then the save is in `N.saving-LIFE`, which no other run uses.
    """

    def __init__(
        self,
        config: TrainConfig,
        phases: Phases | None = None,
        say: Callable[[str], None] = distributed.print_on_process0,
    ) -> None:
        """Opens the directory, and takes its lease. say: reports saves and damage.

        Raises ConfigError if another run writes there, the directory is not writable, or it
        conflicts with `checkpoint.resume`.
        """
        self.config = config
        self.policy = config.checkpoint
        if self.policy.resume == "never" and int(os.environ.get(BEGUN, 0)):
            # A restart: existing checkpoints are this run's own.
            self.policy = dataclasses.replace(self.policy, resume="auto")
        self._phases = phases or Phases()
        self._say = say

        self._current_save: _Save | None = None
        self._save_soon = False  # whether to save after the next step, whatever the policy
        self._n_failures = 0  # in a row
        self._retry_step = 0
        self._failure_reason = ""
        self._removal: threading.Thread | None = None

        _require_storable(config)
        self.directory = (Path(config.output).expanduser() / "checkpoints").absolute()
        self._lease = acquire_on_process0(self.directory.parent)
        try:
            _prepare_directory(self.directory)
            self._local = NodeLocalCheckpoints(self.policy, self.directory, config.launch)
            life = self._lease.life if self._lease else None
            self._life = distributed.broadcast_from_process0(life)
            self._saver = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    state=array_handler(),
                    data=ocp.JsonCheckpointHandler(),
                    metadata=ocp.JsonCheckpointHandler(),
                )
            )
            self._saved = max(self._steps(), default=None)
        except BaseException:
            self._release()
            raise
        problem = self._refusal()
        if problem:
            self.close()
            raise ConfigError(problem)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # Perhaps this process alone has failed: the others would not respond.
        alone = jax.process_count() > 1
        try:
            if not alone:
                with contextlib.suppress(Exception):
                    self._saver.wait_until_finished()
            if self._current_save is not None:
                self._current_save.commit.finish()
                self._current_save = None
        except BaseException:  # a second Ctrl-C
            self._release()
            raise
        if alone:
            self._release()
        else:
            self.close()

    def close(self) -> None:
        """Waits for the current save, and releases the output.

        Removes the directory if it is empty.
        """
        try:
            self._local.close()
            self._settle(0)
            self._saver.close()
            if self._removal:
                self._removal.join()
        finally:
            self._release()
        with contextlib.suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()

    def newest(self) -> SavedCheckpoint | None:
        """Returns the newest checkpoint, without its arrays; None if there is none.

        Raises DamagedCheckpoint.
        """
        return None if self._saved is None else SavedCheckpoint.read(self.directory, self._saved)

    def restore(
        self, layout: ModelLayout, optimizer: Optimizer
    ) -> tuple[SavedCheckpoint, State] | tuple[None, None]:
        """Returns the newest intact checkpoint and its state; the same on all processes.

        (None, None) if the run has no checkpoints. A damaged checkpoint is reported with its leaves
        or files and renamed to `N.damaged`, and the one before it is tried.

        Raises:
          ConfigError: the checkpoint is of another model, or there are checkpoints but none is
            intact: a run never silently starts over.
        """
        self._phases.at("restore")
        if jax.process_index() == 0:
            for name in misnamed_in(self.directory):
                self._say(
                    f"warning: {self.directory / name} is not a step (that would be {int(name)}); "
                    "it is ignored"
                )
        steps = self._steps()
        local = self._local.restore(max(steps, default=-1), layout, optimizer)
        if local is None:
            return self._restore_durable(steps, layout, optimizer)
        if steps:
            self._set_saved(max(steps))
        saved, _ = local
        self._phases.saved = saved.step
        return local

    def roll_back(
        self, first_skipped: int, state: State, layout: ModelLayout, optimizer: Optimizer
    ) -> tuple[SavedCheckpoint, State]:
        """Rolls back to the newest intact checkpoint before a step, and deletes `state`.

        Later checkpoints become `N.passed`. Raises ConfigError if there is none before it.
        """
        self._settle(first_skipped, outlook="; saving is retried after the rollback")
        for leaf in jax.tree.leaves(state):
            leaf.delete()

        self._phases.at("restore")
        steps = [step for step in self._steps() if step < first_skipped]
        saved, saved_state = self._restore_durable(steps, layout, optimizer)
        if saved is None or saved_state is None:
            raise ConfigError(
                f"the run should roll back to before step {first_skipped}, but has no checkpoint "
                "before it; save more often"
            )
        self._local.forget(saved.step)
        for step in self._steps():
            if step > saved.step:
                self._set_aside(step, "passed")
        self._set_saved(saved.step)
        self._save_soon = True  # so that a crash does not resume before the skipped batches
        return saved, saved_state

    def due(self, step: int) -> bool:
        """Whether to save after this step: by the policy, or to retry a failed save."""
        return self._is_due(step) or self._local.due(step)

    def save(
        self,
        step: int,
        state: State,
        data: dict[str, Any],
        layout: ModelLayout,
        optimizer: Optimizer,
        *,
        last: bool = False,
    ) -> State:
        """Copies the state to the host and returns it; writing continues in the background.

        A step that is already saved is skipped. Donates `state`, and needs memory for one extra
        leaf (`mesh_lm.state.disk_form.to_disk`). A failed save is reported, its remains are
        removed, and it is retried some steps later.

        Args:
          data: the data position after this step, from `Batches.state`.
          last: whether this is the run's last save: it is waited for and retried immediately;
            StorageError if it cannot be written.
        """
        if step == self._saved:
            return state
        self._phases.at("save")
        if self._local.due(step) and not (last or self._is_due(step)):

            def local_metadata(tree: State) -> dict[str, Any]:
                return self._metadata(step, tree, digests(tree)) | {"durable": self._saved}

            self._local.save(step, state, data, layout, local_metadata)
            return state

        self._settle(
            step, outlook=f"; training continues, and saving is retried at once, with step {step}"
        )
        tree, leaf_digests = to_disk(layout, optimizer, state)
        metadata = self._metadata(step, tree, leaf_digests)
        if last:
            self._save_last(step, tree, data, metadata)
        else:
            self._begin(step, tree, data, metadata)
        return back(layout, optimizer, state, tree)  # Orbax has copied everything to host memory

    def poll(self, step: int) -> None:
        """Checks the current save, and whether the lease was lost.

        All processes must call it after every step.
        """
        if self._lease:
            self._lease.raise_if_lost()
        if self._current_save is None or (jax.process_count() > 1 and step % _POLL_EVERY):
            return
        outcomes = distributed.gather_from_all(self._outcome(self._current_save))
        if SaveOutcome.WRITING in outcomes:
            return
        if SaveOutcome.FAILED in outcomes:
            self._record_failure(step)
        else:
            self._record_success()

    def _refusal(self) -> str | None:
        """Returns the reason for which this directory conflicts with `checkpoint.resume`."""
        if self.policy.resume == "required" and self._saved is None:
            return (
                f"no checkpoint in {self.directory}, but checkpoint.resume=required; set the "
                "output of an existing run"
            )
        if self.policy.resume == "never" and self._saved is not None:
            return (
                f"{self.directory} already holds step {self._saved}, and checkpoint.resume=never; "
                "use a new output directory"
            )
        if self._saved is None:
            has_damaged = jax.process_index() == 0 and any(self.directory.glob("*.damaged*"))
            if distributed.broadcast_from_process0(has_damaged):
                return self._none_intact()
        return None

    def _none_intact(self) -> str:
        damaged = ", ".join(sorted(path.name for path in self.directory.glob("*.damaged*")))
        return (
            f"no checkpoint in {self.directory} is intact: {damaged}; repair one and remove "
            ".damaged from its name, or use a new output directory to start from scratch"
        )

    def _restore_durable(
        self, steps: Sequence[int], layout: ModelLayout, optimizer: Optimizer
    ) -> tuple[SavedCheckpoint, State] | tuple[None, None]:
        """Returns the newest intact one of these steps, which are ascending, and its state."""
        for step in reversed(steps):
            try:
                saved = SavedCheckpoint.read(self.directory, step)
                state = saved.resumed(layout, optimizer)
            except DamagedCheckpoint as damage:
                self._say(
                    f"warning: {damage}\nrenamed to {step}.damaged; the checkpoint before it is "
                    "tried"
                )
                self._set_aside(step, "damaged")
                continue
            self._set_saved(max(self._steps()))
            return saved, state
        if steps:
            raise ConfigError(self._none_intact())
        return None, None

    def _is_due(self, step: int) -> bool:
        """Whether to save a durable checkpoint after this step."""
        if self._save_soon:
            return True
        if self._n_failures and self._current_save is None and step >= self._retry_step:
            return True
        return self.policy.every > 0 and step % self.policy.every == 0

    def _save_last(
        self, step: int, tree: State, data: dict[str, Any], metadata: dict[str, Any]
    ) -> None:
        """Saves a step and waits for it. Raises StorageError if all attempts fail."""
        for attempt in range(_LAST_TRIES):
            if attempt:
                time.sleep(2.0**attempt)
            self._begin(step, tree, data, metadata)
            self._settle(step)
            if step == self._saved:
                return
        newest = (
            "there is no older checkpoint"
            if self._saved is None
            else f"the newest checkpoint is step {self._saved}"
        )
        raise StorageError(
            f"step {step} could not be saved in {self.directory}: {self._failure_reason}; "
            f"all attempts to save this last step failed, and {newest}"
        )

    def _begin(
        self, step: int, tree: State, data: dict[str, Any], metadata: dict[str, Any]
    ) -> None:
        """Begins a save: Orbax copies the arrays to host memory, and writes them in a thread."""
        self._say(f"saving step {step} ({certificate(metadata, data)})")
        sealed_metadata = metadata | {"seal": seal(data, metadata)}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree),  # pyright: ignore[reportCallIssue]
            data=ocp.args.JsonSave(data),  # pyright: ignore[reportCallIssue]
            metadata=ocp.args.JsonSave(sealed_metadata),  # pyright: ignore[reportCallIssue]
        )
        saving_directory = self.directory / f"{step}.saving-{self._life}"
        save = _Save(step, Commit(saving_directory, self.directory / str(step), self._lease))
        self._current_save = save
        self._save_soon = False
        try:
            self._saver.save(saving_directory, args=items)
        except Exception as error:  # Orbax and TensorStore have no error classes of their own
            save.error = error

    def _outcome(self, save: _Save) -> SaveOutcome:
        """Returns the outcome of the current save on this process."""
        if save.error is None:
            try:
                self._saver.check_for_errors()
            except Exception as error:
                save.error = error
        save.error = save.error or save.commit.error
        if save.error is not None:
            return SaveOutcome.FAILED
        return SaveOutcome.WRITING if save.commit.pending else SaveOutcome.COMPLETE

    def _settle(self, step: int, *, outlook: str = "") -> None:
        """Waits for the current save and records its outcome. outlook: as in `_record_failure`."""
        save = self._current_save
        if save is None:
            return
        self._phases.at("save")
        if save.error is None:
            try:
                self._saver.wait_until_finished()
            except Exception as error:
                save.error = error
        save.commit.finish()
        outcomes = distributed.gather_from_all(self._outcome(save))
        if all(outcome == SaveOutcome.COMPLETE for outcome in outcomes):
            self._record_success()
        else:
            self._record_failure(step, outlook=outlook)

    def _record_success(self) -> None:
        assert self._current_save is not None
        self._set_saved(self._current_save.step)
        self._current_save = None
        self._n_failures = 0
        self._prune()

    def _record_failure(self, step: int, *, outlook: str | None = None) -> None:
        """Reports a failed save, removes its remains, and decides when it is retried.

        Args:
          step: the current step.
          outlook: the end of the warning; None: it says after which step saving is retried.
        """
        save = self._current_save
        assert save is not None
        self._current_save = None
        self._n_failures += 1
        self._retry_step = step + 2**self._n_failures
        every = self.policy.every
        if every:
            # The policy saves then, anyway.
            self._retry_step = min(self._retry_step, (step // every + 1) * every)

        self._phases.at("save")
        with contextlib.suppress(Exception):
            self._saver.wait_until_finished()  # takes minutes if only another process failed
        save.commit.finish()
        if jax.process_index() == 0:
            _remove(self.directory, f"*.saving-{self._life}*")
        with distributed.collective_errors():
            if self._lease:
                self._lease.raise_if_lost()

        reasons = distributed.gather_from_all(reason(save.error) if save.error else "")
        self._failure_reason = next(
            filter(None, reasons), "it was not completed, and Orbax gave no reason"
        )
        if self._n_failures < ALARM:
            severity = "warning: "
        else:
            newest = (
                "THERE IS NO CHECKPOINT"
                if self._saved is None
                else f"the newest checkpoint is step {self._saved}"
            )
            severity = (
                f"ERROR: {self._n_failures} saves in a row have failed, and a crash now would lose "
                f"everything since: {newest}. "
            )
        if outlook is None:
            outlook = f"; training continues, and saving is retried after step {self._retry_step}"
        self._say(
            f"{severity}step {save.step} could not be saved in {self.directory}: "
            f"{self._failure_reason}{outlook}"
        )

    def _set_saved(self, step: int) -> None:
        self._saved = step
        self._phases.saved = step

    def _metadata(self, step: int, tree: State, leaf_digests: dict[str, str]) -> dict[str, Any]:
        metadata = {
            "format": FORMAT,
            "step": step,
            "config": as_dict(self.config),
            "parts": state_shapes(tree),
            "digests": leaf_digests,
            "versions": {"jax": jax.__version__, "orbax": ocp.__version__},
        }
        # As it will be read: tuples are lists in JSON.
        return json.loads(json.dumps(metadata))

    def _steps(self) -> list[int]:
        """Returns the steps that process 0 sees, ascending."""
        return distributed.broadcast_from_process0(
            steps_in(self.directory) if jax.process_index() == 0 else None
        )

    def _set_aside(self, step: int, suffix: str) -> None:
        """Renames a step to `N.suffix`, or to `N.suffix-2` and so on if that exists."""
        if jax.process_index() == 0:
            self._require_lease()
            target = self.directory / f"{step}.{suffix}"
            number = 1
            while target.exists():
                number += 1
                target = self.directory / f"{step}.{suffix}-{number}"
            (self.directory / str(step)).rename(target)
        self._steps()  # waits for process 0

    def _prune(self) -> None:
        """Removes checkpoints that the policy does not keep, in threads: it may take minutes."""
        if jax.process_index() > 0:
            return
        self._require_lease()
        for step in steps_in(self.directory)[: -self.policy.keep]:
            # Renamed first, so that no half-removed directory is named as a step.
            with contextlib.suppress(OSError):
                removed = (self.directory / str(step)).rename(self.directory / f"{step}.removed")
                self._removal = threading.Thread(target=shutil.rmtree, args=(removed, True))
                self._removal.start()

    def _require_lease(self) -> None:
        """Reads the lease, and raises ReplacedError if another run holds it.

        A disk that does not answer proves nothing, and is ignored.
        """
        if self._lease:
            with contextlib.suppress(OSError):
                self._lease.require()

    def _release(self) -> None:
        if self._lease:
            self._lease.release()


def _require_storable(config: TrainConfig) -> None:
    """Raises ConfigError if the config cannot be stored, or its output is no directory."""
    try:
        json.dumps(as_dict(config))
    except TypeError as error:
        raise ConfigError(
            f"the config must be stored as JSON with every checkpoint, and cannot be: {error}"
        ) from error
    if "://" in config.output:
        raise ConfigError(
            f"output={config.output}: checkpoints cannot be written to a URL; mount a bucket as a "
            "directory (gcsfuse, mountpoint-s3)"
        )


def _prepare_directory(directory: Path) -> None:
    """Creates the directory, and removes what a killed run left there.

    Raises ConfigError on all processes if one cannot write there.
    """
    quiet()
    with distributed.collective_errors():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".probe-{jax.process_index()}"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write checkpoints to {directory}: {error.strerror}"
            ) from error
    distributed.require_shared(directory)
    if jax.process_index() == 0:
        for pattern in ("*.saving-*", "*.orbax-checkpoint-tmp*", "*.removed*"):
            _remove(directory, pattern)


def _remove(directory: Path, pattern: str) -> None:
    """Removes directories, each of which is renamed first.

    So a run that was suspended between its last look at the lease and its commit can no longer give
    a save its step's name: it either did so before this, and then the step is complete, or it finds
    nothing to rename.
    """
    for path in directory.glob(pattern):
        step = path.name.partition(".")[0]
        removed = path.with_name(f"{step}.removed-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
