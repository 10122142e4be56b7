"""The checkpoints of one run: when to save, what to keep, what to do when a save fails or a checkpoint is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from mesh_lm import distributed
from mesh_lm.checkpoint.node_local import NodeLocalCheckpoints
from mesh_lm.checkpoint.reader import FORMAT, DamagedCheckpoint, SavedCheckpoint, array_handler, certificate, described, seal, steps_in
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.distributed.phases import Phases
from mesh_lm.errors import ConfigError
from mesh_lm.launch.environment import BEGUN
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State
from mesh_lm.state.digest import digests
from mesh_lm.state.disk_form import back, to_disk

_ASK_EVERY = 10
"""Steps between two questions among processes whether the save in flight is complete."""
_LAST_TRIES = 4
"""Tries to save what would be lost otherwise: the last step, or the one at which a run is stopped."""
_WRITING, _COMPLETE, _FAILED = range(3)


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. A context manager: leaving it waits for the save in flight.

    A step is a directory with its number for a name. `N.damaged` is one that could not be verified, `N.passed` one that the run went back
    behind; both are left for people to look at.
    """

    def __init__(self, config: TrainConfig, phases: Phases | None = None) -> None:
        """Raises ConfigError where the directory cannot be written, or holds other checkpoints than `checkpoint.resume` allows."""
        self.config, self.policy, self._phases = config, config.checkpoint, phases or Phases()
        if self.policy.resume == "never" and int(os.environ.get(BEGUN, 0)):
            self.policy = dataclasses.replace(self.policy, resume="auto")  # it was here before: what is there is its own
        try:
            json.dumps(as_dict(config))
        except TypeError as error:
            raise ConfigError(f"the config is stored with every checkpoint, as JSON, and cannot be: {error}") from error
        if "://" in config.output:
            raise ConfigError(f"output={config.output} must be a directory; mount a bucket as one (gcsfuse, mountpoint-s3)")
        self.directory = (Path(config.output).expanduser() / "checkpoints").absolute()
        _open(self.directory)
        self._local = NodeLocalCheckpoints(self.policy, self.directory)
        self._saver = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=array_handler(), data=ocp.JsonCheckpointHandler(), metadata=ocp.JsonCheckpointHandler())
        )
        self._writing: int | None = None
        self._removing: threading.Thread | None = None
        self._failures = self._retry = 0
        self._soon = False
        self._saved = max(self._steps(), default=None)
        if problem := self._refusal():
            self.close()
            raise ConfigError(problem)

    def _refusal(self) -> str | None:
        policy = self.policy
        if policy.resume == "required" and self._saved is None:
            return f"no checkpoint in {self.directory}, and checkpoint.resume=required; set the output of a run"
        if policy.resume == "never" and self._saved is not None:
            return f"{self.directory} already holds step {self._saved}, and checkpoint.resume=never; set another output"
        if self._saved is None and distributed.broadcast_from_process0(jax.process_index() == 0 and any(self.directory.glob("*.damaged*"))):
            return self._nothing_whole()
        return None

    def _nothing_whole(self) -> str:
        left = ", ".join(sorted(path.name for path in self.directory.glob("*.damaged*")))
        fix = "repair one and take .damaged from its name, or set another output to begin anew"
        return f"no checkpoint in {self.directory} is whole: {left}; {fix}"

    def newest(self) -> SavedCheckpoint | None:
        """The newest checkpoint's descriptions; None where there is none. Raises DamagedCheckpoint."""
        return None if self._saved is None else SavedCheckpoint.read(self.directory, self._saved)

    def restore(
        self, layout: ModelLayout, optimizer: Optimizer, before: int | None = None
    ) -> tuple[SavedCheckpoint, State] | tuple[None, None]:
        """Returns the newest intact checkpoint and its state, or (None, None) for a run without checkpoints; the same on all processes.

        A damaged checkpoint is reported with its leaves or files and renamed to `N.damaged`, and the one before it is tried.

        Args:
          before: consider only steps below this one.

        Raises:
          ConfigError: the checkpoint is of another model, or there are checkpoints but none is intact: a run never silently starts over.
        """
        self._phases.at("restore")
        steps = [step for step in self._steps() if before is None or step < before]
        if before is None and (found := self._local.restore(max(steps, default=-1), layout, optimizer)):
            if steps:
                self._committed(max(steps))
            self._phases.saved = found[0].step
            return found
        for step in reversed(steps):
            try:
                saved = SavedCheckpoint.read(self.directory, step)
                state = saved.resumed(layout, optimizer)
            except DamagedCheckpoint as damage:
                distributed.print_on_process0(f"warning: {damage}\nput aside as {step}.damaged; the checkpoint before it is taken")
                self._put_aside(step, "damaged")
                continue
            self._committed(max(self._steps()))
            return saved, state
        if steps:
            raise ConfigError(self._nothing_whole())
        return None, None

    def roll_back(self, before: int, state: State, layout: ModelLayout, optimizer: Optimizer) -> tuple[SavedCheckpoint, State]:
        """The newest whole checkpoint below step `before` in place of `state`, whose memory it takes; those after it are put aside as
        `N.passed`. Raises ConfigError without one."""
        self._settle(before)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        saved, older = self.restore(layout, optimizer, before)
        if saved is None or older is None:
            raise ConfigError(f"the run should go back behind step {before}, and has no checkpoint before it; save more often")
        self._local.forget(saved.step)
        for later in self._steps():
            if later > saved.step:
                self._put_aside(later, "passed")
        self._committed(saved.step)
        self._soon = True  # so that a crash does not lead back to the batches that were left behind
        return saved, older

    def _committed(self, step: int) -> None:
        self._saved = self._phases.saved = step

    def due(self, step: int) -> bool:
        """Whether to save after this many steps: by the policy, or because a save failed and it is time to try again."""
        return self._due(step) or self._local.due(step)

    def _due(self, step: int) -> bool:
        again = self._failures > 0 and step >= self._retry
        return self._soon or again or (self.policy.every > 0 and step % self.policy.every == 0)

    def save(
        self, step: int, state: State, data: dict[str, Any], layout: ModelLayout, optimizer: Optimizer, *, last: bool = False
    ) -> State:
        """Copies the state off the devices and gives it back; the write goes on in the background. A step already saved is left alone.

        It takes the state over, and needs the memory of one leaf more (`mesh_lm.state.disk_form.to_disk`). A save that fails
        is said, its remains are removed, and it is due again some steps later.

        data: the place in the data after this step, as `Batches.state` gives it. last: nothing comes after it, so it is tried again at once
        and waited for; raises ConfigError where it cannot be written.
        """
        if step == self._saved:
            return state
        self._phases.at("save")
        if self._local.due(step) and not (last or self._due(step)):
            self._local.save(step, state, data, layout, lambda kept: self._metadata(kept, digests(kept)) | {"durable": self._saved})
            return state
        self._settle(step)
        tree, found = to_disk(layout, optimizer, state)
        metadata = self._metadata(tree, found)
        for attempt in range(_LAST_TRIES if last else 1):
            if attempt:
                time.sleep(2.0**attempt)
            self._begin(step, tree, data, metadata)
            if last:
                self._settle(step, last=True)
                if step == self._saved:
                    break
        else:
            if last:
                newest = "there is no older one" if self._saved is None else f"the newest checkpoint is step {self._saved}"
                raise ConfigError(f"step {step} could not be saved in {self.directory}, the reason is above; {newest}")
        return back(layout, optimizer, state, tree)  # Orbax has all of it in the host's memory

    def poll(self, step: int) -> None:
        """Called after every step, on all processes: notes what became of the save in flight."""
        if self._writing is None or (jax.process_count() > 1 and step % _ASK_EVERY):
            return
        outcomes = distributed.gather_from_all(self._outcome())
        if _WRITING not in outcomes:
            self._conclude(step, failed=_FAILED in outcomes)

    def _begin(self, step: int, tree: State, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        distributed.print_on_process0(f"saving step {step} ({certificate(metadata, data)})")
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree),  # pyright: ignore[reportCallIssue]
            data=ocp.args.JsonSave(data),  # pyright: ignore[reportCallIssue]
            metadata=ocp.args.JsonSave(metadata | {"seal": seal(data, metadata)}),  # pyright: ignore[reportCallIssue]
        )
        self._writing, self._error, self._soon = step, None, False
        try:
            self._saver.save(self.directory / str(step), args=items)
        except Exception as error:  # Orbax and TensorStore have no class of errors of their own
            self._error = error

    def _outcome(self) -> int:
        """Of the save in flight, on this process."""
        if self._error is None:
            try:
                self._saver.check_for_errors()
            except Exception as error:
                self._error = error
        if self._error is not None:
            return _FAILED
        # Only process 0 gives the directory its name, when all are done; others may see that late.
        return _WRITING if jax.process_index() == 0 and not (self.directory / str(self._writing)).is_dir() else _COMPLETE

    def _settle(self, step: int, *, last: bool = False) -> None:
        """Waits for the save in flight and notes what became of it."""
        if self._writing is None:
            return
        self._phases.at("save")
        if self._error is None:
            try:
                self._saver.wait_until_finished()
            except Exception as error:
                self._error = error
        self._conclude(step, failed=any(outcome != _COMPLETE for outcome in distributed.gather_from_all(self._outcome())), last=last)

    def _conclude(self, step: int, *, failed: bool, last: bool = False) -> None:
        writing, self._writing = self._writing, None
        assert writing is not None
        if not failed:
            self._committed(writing)
            self._failures = 0
            self._prune()
            return
        self._failures += 1
        self._retry = step + min(2**self._failures, self.policy.every or 2**self._failures)
        self._phases.at("save")
        with contextlib.suppress(Exception):
            self._saver.wait_until_finished()  # minutes, where another process's part failed and this one's did not
        self._remove_remains()
        reason = str(self._error or "another process failed").strip().splitlines()[0][:300]
        newest = "THERE IS NO CHECKPOINT" if self._saved is None else f"the newest checkpoint is step {self._saved}"
        loud = f"ERROR: {self._failures} saves in a row have failed, and a crash now would lose all since then: {newest}. "
        distributed.print_on_process0(
            f"{loud if self._failures >= self.policy.alarm else 'warning: '}step {writing} could not be saved in {self.directory}: "
            f"{reason}" + ("" if last else f"; training continues, and tries again after step {self._retry}")
        )

    def _metadata(self, tree: State, found: dict[str, str]) -> dict[str, Any]:
        versions = {"jax": jax.__version__, "orbax": ocp.__version__}
        about = {"format": FORMAT, "config": as_dict(self.config), "parts": described(tree), "versions": versions, "digests": found}
        return json.loads(json.dumps(about))

    def _steps(self) -> list[int]:
        """As process 0 sees them."""
        return distributed.broadcast_from_process0(steps_in(self.directory) if jax.process_index() == 0 else None)

    def _put_aside(self, step: int, why: str) -> None:
        if jax.process_index() == 0:
            names = itertools.chain([f"{step}.{why}"], (f"{step}.{why}-{n}" for n in itertools.count(2)))
            free = next(self.directory / name for name in names if not (self.directory / name).exists())
            (self.directory / str(step)).rename(free)
        self._steps()  # which waits for process 0

    def _prune(self) -> None:
        """Removes what the policy does not keep, in the background: on some file systems that takes minutes."""
        if jax.process_index() > 0:
            return
        for step in steps_in(self.directory)[: -self.policy.keep]:
            with contextlib.suppress(OSError):  # renamed first, so that no half of a directory has a step's name
                doomed = (self.directory / str(step)).rename(self.directory / f"{step}.removed")
                self._removing = threading.Thread(target=shutil.rmtree, args=(doomed, True))
                self._removing.start()

    def _remove_remains(self) -> None:
        if jax.process_index() == 0:
            _remove(self.directory, "*.orbax-checkpoint-tmp*")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # perhaps on this process alone: then the others would not answer
            self._writing = None
            if jax.process_count() > 1:
                return
            with contextlib.suppress(Exception):
                self._saver.wait_until_finished()
        self.close()

    def close(self) -> None:
        """Waits for the save in flight. A run that ends without a checkpoint leaves no empty directory behind."""
        self._local.close()
        self._settle(0)
        self._saver.close()
        if self._removing:
            self._removing.join()
        with contextlib.suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()


@functools.cache
def _quiet() -> None:
    """What Orbax and TensorStore say of a save or a restore that failed, over hundreds of lines, is said here in one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    told = sys.unraisablehook

    def hook(error: sys.UnraisableHookArgs) -> None:
        late = str(error.exc_value) == "Event loop is closed"  # a write that ends after the first one has failed
        left = "orbax" in getattr(getattr(error.object, "cr_code", None), "co_filename", "")  # a read, after the first one has failed
        if not (late or left):
            told(error)

    sys.unraisablehook = hook


def _open(directory: Path) -> None:
    _quiet()
    with distributed.collective_errors():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (probe := directory / f".probe-{jax.process_index()}").touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write checkpoints to {directory}: {error.strerror}") from error
    distributed.require_shared(directory)
    if jax.process_index() == 0:  # what a killed run left
        for pattern in ("*.orbax-checkpoint-tmp*", "*.removed"):
            _remove(directory, pattern)


def _remove(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        shutil.rmtree(path, ignore_errors=True)
