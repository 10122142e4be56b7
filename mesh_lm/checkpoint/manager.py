"""Manages the checkpoints of a run: when to save, what to keep, and how to handle failed saves and
damaged checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from mesh_lm import distributed
from mesh_lm.checkpoint.commit import Commit
from mesh_lm.checkpoint.lease import held_by_process0
from mesh_lm.checkpoint.node_local import NodeLocalCheckpoints
from mesh_lm.checkpoint.quiet import quiet, reason
from mesh_lm.checkpoint.reader import (
    FORMAT,
    DamagedCheckpoint,
    SavedCheckpoint,
    array_handler,
    certificate,
    described,
    misnamed_in,
    seal,
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

_ASK_EVERY = 10
"""Steps between checks among processes whether the current save is complete."""
_LAST_TRIES = 4
"""Attempts to save the last step, or the one at which a run is stopped; it would otherwise be
lost."""
_WRITING, _COMPLETE, _FAILED = range(3)


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. A context manager, which waits for the
    current save on exit.

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
        """Takes the function that reports saves and damage.

        Raises ConfigError if another run writes there, the directory is not writable, or it
        conflicts with `checkpoint.resume`.
        """
        self.config, self.policy, self._phases, self._say = (
            config,
            config.checkpoint,
            phases or Phases(),
            say,
        )
        if self.policy.resume == "never" and int(os.environ.get(BEGUN, 0)):
            # a restart: existing checkpoints are this run's own
            self.policy = dataclasses.replace(self.policy, resume="auto")
        try:
            json.dumps(as_dict(config))
        except TypeError as error:
            raise ConfigError(
                f"the config must be stored as JSON with every checkpoint, and cannot be: {error}"
            ) from error
        if "://" in config.output:
            raise ConfigError(
                f"output={config.output} must be a directory; mount a bucket as one (gcsfuse, "
                "mountpoint-s3)"
            )
        self.directory = (Path(config.output).expanduser() / "checkpoints").absolute()
        self._lease = held_by_process0(self.directory.parent)
        try:
            _open(self.directory)
            self._local = NodeLocalCheckpoints(self.policy, self.directory, config.launch)
            self._life = distributed.broadcast_from_process0(self._lease and self._lease.life)
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
        self._writing: int | None = None
        self._removing: threading.Thread | None = None
        self._failures = self._retry = 0
        self._reason, self._soon = "", False
        if problem := self._refusal():
            self.close()
            raise ConfigError(problem)

    def _refusal(self) -> str | None:
        policy = self.policy
        if policy.resume == "required" and self._saved is None:
            return (
                f"no checkpoint in {self.directory}, but checkpoint.resume=required; set the "
                "output of an existing run"
            )
        if policy.resume == "never" and self._saved is not None:
            return (
                f"{self.directory} already holds step {self._saved}, and checkpoint.resume=never; "
                "use a new output directory"
            )
        if self._saved is None and distributed.broadcast_from_process0(
            jax.process_index() == 0 and any(self.directory.glob("*.damaged*"))
        ):
            return self._none_intact()
        return None

    def _none_intact(self) -> str:
        damaged = ", ".join(sorted(path.name for path in self.directory.glob("*.damaged*")))
        fix = (
            "repair one and remove .damaged from its name, or use a new output directory to start "
            "from scratch"
        )
        return f"no checkpoint in {self.directory} is intact: {damaged}; {fix}"

    def newest(self) -> SavedCheckpoint | None:
        """Returns the newest checkpoint, without its arrays; None if there is none. Raises
        DamagedCheckpoint.
        """
        return None if self._saved is None else SavedCheckpoint.read(self.directory, self._saved)

    def restore(
        self, layout: ModelLayout, optimizer: Optimizer, before: int | None = None
    ) -> tuple[SavedCheckpoint, State] | tuple[None, None]:
        """Returns the newest intact checkpoint and its state, or (None, None) for a run without
        checkpoints; the same on all processes.

        A damaged checkpoint is reported with its leaves or files and renamed to `N.damaged`, and
        the one before it is tried.

        Args:
          before: consider only steps below this one.

        Raises:
          ConfigError: the checkpoint is of another model, or there are checkpoints but none is
          intact: a run never silently starts over.
        """
        self._phases.at("restore")
        if before is None and jax.process_index() == 0:
            for name in misnamed_in(self.directory):
                self._say(
                    f"warning: {self.directory / name} is not a step (that would be {int(name)}); "
                    "it is ignored"
                )
        steps = [step for step in self._steps() if before is None or step < before]
        if before is None and (
            local := self._local.restore(max(steps, default=-1), layout, optimizer)
        ):
            if steps:
                self._committed(max(steps))
            self._phases.saved = local[0].step
            return local
        for step in reversed(steps):
            try:
                saved = SavedCheckpoint.read(self.directory, step)
                state = saved.resumed(layout, optimizer)
            except DamagedCheckpoint as damage:
                self._say(
                    f"warning: {damage}\nrenamed to {step}.damaged; the checkpoint before it is "
                    "tried"
                )
                self._put_aside(step, "damaged")
                continue
            self._committed(max(self._steps()))
            return saved, state
        if steps:
            raise ConfigError(self._none_intact())
        return None, None

    def roll_back(
        self, before: int, state: State, layout: ModelLayout, optimizer: Optimizer
    ) -> tuple[SavedCheckpoint, State]:
        """Rolls back to the newest intact checkpoint below step `before`, and deletes `state`;
        later checkpoints become `N.passed`.

        Raises ConfigError if there is none.
        """
        self._settle(before, "; saving is retried after the rollback")
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        saved, older = self.restore(layout, optimizer, before)
        if saved is None or older is None:
            raise ConfigError(
                f"the run should roll back to before step {before}, but has no checkpoint before "
                "it; save more often"
            )
        self._local.forget(saved.step)
        for later in self._steps():
            if later > saved.step:
                self._put_aside(later, "passed")
        self._committed(saved.step)
        self._soon = True  # so that a crash does not resume before the skipped batches
        return saved, older

    def _committed(self, step: int) -> None:
        self._saved = self._phases.saved = step

    def due(self, step: int) -> bool:
        """Whether to save after this step: by the policy, or to retry a failed save."""
        return self._due(step) or self._local.due(step)

    def _due(self, step: int) -> bool:
        again = self._failures > 0 and self._writing is None and step >= self._retry
        return self._soon or again or (self.policy.every > 0 and step % self.policy.every == 0)

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
        """Copies the state to the host and returns it; writing continues in the background. A step
        that is already saved is skipped.

        Donates `state`, and needs memory for one extra leaf (`mesh_lm.state.disk_form.to_disk`). A
        failed save is reported, its remains are removed, and it is retried some steps later.

        Args:
          data: the data position after this step, from `Batches.state`. last: whether this is the
          run's last save: it is waited for and retried immediately; StorageError if it cannot be
          written.
        """
        if step == self._saved:
            return state
        self._phases.at("save")
        if self._local.due(step) and not (last or self._due(step)):
            self._local.save(
                step,
                state,
                data,
                layout,
                lambda tree: self._metadata(step, tree, digests(tree)) | {"durable": self._saved},
            )
            return state
        self._settle(step, f"; training continues, and saving is retried at once, with step {step}")
        tree, leaf_digests = to_disk(layout, optimizer, state)
        metadata = self._metadata(step, tree, leaf_digests)
        for attempt in range(_LAST_TRIES if last else 1):
            if attempt:
                time.sleep(2.0**attempt)
            self._begin(step, tree, data, metadata)
            if last:
                self._settle(step)
                if step == self._saved:
                    break
        else:
            if last:
                newest = (
                    "there is no older checkpoint"
                    if self._saved is None
                    else f"the newest checkpoint is step {self._saved}"
                )
                raise StorageError(
                    f"step {step} could not be saved in {self.directory}: {self._reason}; {newest}"
                )
        return back(layout, optimizer, state, tree)  # Orbax has copied everything to host memory

    def poll(self, step: int) -> None:
        """Checks the current save, and whether the lease was lost. All processes must call it after
        every step.
        """
        if self._lease:
            self._lease.require_kept()
        if self._writing is None or (jax.process_count() > 1 and step % _ASK_EVERY):
            return
        outcomes = distributed.gather_from_all(self._outcome())
        if _WRITING not in outcomes:
            self._conclude(step, _FAILED in outcomes)

    def _begin(
        self, step: int, tree: State, data: dict[str, Any], metadata: dict[str, Any]
    ) -> None:
        self._say(f"saving step {step} ({certificate(metadata, data)})")
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree),  # pyright: ignore[reportCallIssue]
            data=ocp.args.JsonSave(data),  # pyright: ignore[reportCallIssue]
            metadata=ocp.args.JsonSave(metadata | {"seal": seal(data, metadata)}),  # pyright: ignore[reportCallIssue]
        )
        self._writing, self._error, self._soon = step, None, False
        unnamed = self.directory / f"{step}.saving-{self._life}"
        self._commit = Commit(unnamed, self.directory / str(step), self._lease)
        try:
            self._saver.save(unnamed, args=items)
        except Exception as error:  # Orbax and TensorStore have no error classes of their own
            self._error = error

    def _outcome(self) -> int:
        """Returns the outcome of the current save on this process."""
        if self._error is None:
            try:
                self._saver.check_for_errors()
            except Exception as error:
                self._error = error
        self._error = self._error or self._commit.error
        if self._error is not None:
            return _FAILED
        return _WRITING if self._commit.pending else _COMPLETE

    def _settle(self, step: int, then: str = "") -> None:
        """Waits for the current save and records its outcome. then: as for `_conclude`."""
        if self._writing is None:
            return
        self._phases.at("save")
        if self._error is None:
            try:
                self._saver.wait_until_finished()
            except Exception as error:
                self._error = error
        self._commit.finish()
        self._conclude(
            step,
            any(outcome != _COMPLETE for outcome in distributed.gather_from_all(self._outcome())),
            then,
        )

    def _conclude(self, step: int, failed: bool, then: str | None = None) -> None:
        """Records the outcome of the current save. then: the end of the warning if it has failed;
        None: when it is retried.
        """
        writing, self._writing = self._writing, None
        assert writing is not None
        if not failed:
            self._committed(writing)
            self._failures = 0
            self._prune()
            return
        self._failures += 1
        self._retry, every = step + 2**self._failures, self.policy.every
        # the policy saves then, anyway
        self._retry = min(self._retry, (step // every + 1) * every) if every else self._retry
        self._phases.at("save")
        with contextlib.suppress(Exception):
            self._saver.wait_until_finished()  # takes minutes if only another process failed
        self._commit.finish()
        if jax.process_index() == 0:
            _remove(self.directory, f"*.saving-{self._life}*")
        with distributed.collective_errors():
            if self._lease:
                self._lease.require_kept()
        reasons = distributed.gather_from_all(reason(self._error) if self._error else "")
        self._reason = next(filter(None, reasons), "it was not completed, and Orbax gave no reason")
        newest = (
            "THERE IS NO CHECKPOINT"
            if self._saved is None
            else f"the newest checkpoint is step {self._saved}"
        )
        alarm = (
            f"ERROR: {self._failures} saves in a row have failed, and a crash now would lose "
            f"everything since: {newest}. "
        )
        self._say(
            f"{alarm if self._failures >= self.policy.alarm else 'warning: '}step {writing} could "
            f"not be saved in {self.directory}: {self._reason}"
            + (
                f"; training continues, and saving is retried after step {self._retry}"
                if then is None
                else then
            )
        )

    def _metadata(self, step: int, tree: State, leaf_digests: dict[str, str]) -> dict[str, Any]:
        about = {
            "format": FORMAT,
            "step": step,
            "config": as_dict(self.config),
            "parts": described(tree),
            "digests": leaf_digests,
        }
        return json.loads(
            json.dumps(about | {"versions": {"jax": jax.__version__, "orbax": ocp.__version__}})
        )

    def _steps(self) -> list[int]:
        """Returns the steps that process 0 sees."""
        return distributed.broadcast_from_process0(
            steps_in(self.directory) if jax.process_index() == 0 else None
        )

    def _put_aside(self, step: int, why: str) -> None:
        if jax.process_index() == 0:
            self._require_lease()
            names = itertools.chain(
                [f"{step}.{why}"], (f"{step}.{why}-{n}" for n in itertools.count(2))
            )
            free = next(
                self.directory / name for name in names if not (self.directory / name).exists()
            )
            (self.directory / str(step)).rename(free)
        self._steps()  # waits for process 0

    def _prune(self) -> None:
        """Removes checkpoints that the policy does not keep, in the background because it may take
        minutes.
        """
        if jax.process_index() > 0:
            return
        self._require_lease()
        for step in steps_in(self.directory)[: -self.policy.keep]:
            # renamed first, so that no half-removed directory is named as a step
            with contextlib.suppress(OSError):
                doomed = (self.directory / str(step)).rename(self.directory / f"{step}.removed")
                self._removing = threading.Thread(target=shutil.rmtree, args=(doomed, True))
                self._removing.start()

    def _require_lease(self) -> None:
        """Raises ReplacedError if another run holds the lease, which is read for this; a disk that
        does not answer is no reason.
        """
        if self._lease:
            with contextlib.suppress(OSError):
                self._lease.require()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # perhaps this process alone has failed: the others would not respond
        alone = kind is not None and jax.process_count() > 1
        try:
            if kind is not None:
                if not alone:
                    with contextlib.suppress(Exception):
                        self._saver.wait_until_finished()
                if self._writing is not None:
                    self._commit.finish()
                self._writing = None
        except BaseException:  # a second Ctrl-C
            self._release()
            raise
        if alone:
            self._release()
        else:
            self.close()

    def _release(self) -> None:
        if self._lease:
            self._lease.release()

    def close(self) -> None:
        """Waits for the current save, and releases the output. Removes the directory if it is
        empty.
        """
        try:
            self._local.close()
            self._settle(0)
            self._saver.close()
            if self._removing:
                self._removing.join()
        finally:
            self._release()
        with contextlib.suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()


def _open(directory: Path) -> None:
    quiet()
    with distributed.collective_errors():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (probe := directory / f".probe-{jax.process_index()}").touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write checkpoints to {directory}: {error.strerror}"
            ) from error
    distributed.require_shared(directory)
    if jax.process_index() == 0:  # remains of a killed run
        for pattern in ("*.saving-*", "*.orbax-checkpoint-tmp*", "*.removed*"):
            _remove(directory, pattern)


def _remove(directory: Path, pattern: str) -> None:
    """Removes directories. Each is renamed first, so that a run that was suspended between its last
    look at the lease and its commit can no longer give a save its step's name: it either did so
    before this, and then the step is complete, or it finds nothing to rename.
    """
    for path in directory.glob(pattern):
        doomed = path.with_name(f"{path.name.partition('.')[0]}.removed-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
