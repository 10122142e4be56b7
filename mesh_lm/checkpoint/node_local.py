"""Node-local checkpoints: each process saves its devices' shards to a local disk, more often than
checkpoints go to shared storage.

The files below `checkpoint.local` are `<run>/<step>/<process>-of-<count>/state.raw`, the distinct
shards of all leaves, and `description.json`, which lists them and is renamed into place last: if it
exists, the step is complete. Processes do not wait for each other in a save. A restore uses a step
only if it is complete on every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh_lm import distributed, strict_json
from mesh_lm.checkpoint.copies import Copies
from mesh_lm.checkpoint.reader import SavedCheckpoint, certificate, names_a_step, seal
from mesh_lm.checkpoint.transfer import FILES, clear, flush, sync
from mesh_lm.config import CheckpointConfig, LaunchConfig
from mesh_lm.errors import number_ranges
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.state.digest import digests, host_digest, leaf_name
from mesh_lm.state.disk_form import with_used, without_used
from mesh_lm.state.host_copy import Shards, assembled, copied

_KEEP = 2
"""Steps to keep: at a crash, processes may be one save apart, and then have only the previous one
in common."""
_PATIENCE = 60.0
"""Seconds to wait for the previous save before a new one is skipped."""
_LIFE = re.compile(r"[0-9a-f]{8}")
_MARK = ".local"
_ARRAYS, _DESCRIPTION = FILES


class NodeLocalCheckpoints:
    """The node-local checkpoints of one run; without `checkpoint.local` it does nothing. Disk
    errors only give a warning.
    """

    def __init__(self, policy: CheckpointConfig, directory: Path, launch: LaunchConfig) -> None:
        """directory: the run's durable checkpoints. All processes must call it."""
        self._every = policy.local_every if policy.local else 0
        self._fresh = policy.resume == "never"
        self._thread: threading.Thread | None = None
        self._failed = False
        self._copies: Copies | None = None
        if not self._every:
            return
        output, life = (
            hashlib.sha256(str(directory).encode()).hexdigest()[:16],
            _identity(directory),
        )
        output, life = distributed.broadcast_from_process0([output, life])
        self.directory = Path(policy.local).expanduser().absolute() / f"{output}-{life}"
        self._index, self._of = jax.process_index(), f"-of-{jax.process_count()}"
        with contextlib.suppress(OSError):  # remove those of runs whose output was deleted
            for old in self.directory.parent.glob(f"{output}-*"):
                if old != self.directory:
                    shutil.rmtree(old, ignore_errors=True)
                    print(
                        f"{distributed.log_prefix()}warning: {old} is removed: its local "
                        "checkpoints are of an earlier run with this output, or "
                        f"{directory / _MARK} was deleted",
                        flush=True,
                    )
        if policy.local_copies:
            self._copies = Copies(
                policy.local_copies, self.directory, launch, self._place, self._prune
            )

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self._every > 0 and step % self._every == 0

    def save(
        self,
        step: int,
        state: State,
        data: dict[str, Any],
        layout: ModelLayout,
        metadata: Callable[[State], dict[str, Any]],
    ) -> None:
        """Copies this process's shards to host memory; a thread writes them. All processes must
        call it.

        Args:
          state: the training state; params that are computed from the master are not saved.
          metadata: returns the metadata that a durable checkpoint of a tree would have; may wait
          for other processes.
        """
        # Comes before metadata, which synchronizes processes: so none is more than one save ahead
        # of a slow disk.
        ready, state = self._finish(), without_used(layout, state)
        described = metadata(state)
        parts = copied(state)
        if ready:
            sealed = described | {"seal": seal(data, described)}
            about = {
                "step": step,
                "layout": _layout(state, layout),
                "data": data,
                "metadata": sealed,
            }
            self._thread = threading.Thread(
                target=self._write, args=(step, parts, about), daemon=True
            )
            self._thread.start()

    def restore(
        self, newest: int, layout: ModelLayout, optimizer: Optimizer
    ) -> tuple[SavedCheckpoint, State] | None:
        """Returns the newest step that is complete on all processes, if it is newer than `newest`
        (a durable step, or -1), else None.

        Its layout must be the same, and its bits are verified. Unusable local steps are removed,
        and one line says why. All processes must call it and get the same result.
        """
        if not self._every:
            return None
        listing = (
            []
            if self._fresh
            else [[step, holds] for step, holds in self._complete().items() if step > newest]
        )
        listings = distributed.gather_from_all(listing)
        held_by = _holders(listings)
        candidates = sorted(held_by, reverse=True)
        where = " or on those of other nodes" if self._copies else ""
        reasons = (
            []
            if candidates or not any(listings)
            else [f"no step is on the local disks of all processes{where}"]
        )
        if partial := [
            step
            for step in ({} if self._fresh else self._steps())
            if step > max(candidates, default=newest)
        ]:
            reasons = reasons or [
                f"step {', '.join(map(str, partial))} is not complete on all processes"
            ]  # as process 0, which prints, sees it
        with contextlib.suppress(OSError):
            for other in self.directory.glob("*/*-of-*"):
                if not other.name.endswith(self._of):
                    reasons = reasons or [
                        (
                            f"step {other.parent.name} was saved by "
                            f"{other.name.rpartition('-')[2]} processes"
                        )
                    ]
                    shutil.rmtree(other, ignore_errors=True)
        # A node that had another place before keeps nothing of it that no process can use.
        for step, processes in self._steps().items():
            for process in processes if step not in held_by else []:
                self._remove(step, process)
        for step in candidates:
            saved = state = None
            lost = [process for process, holder in enumerate(held_by[step]) if holder != process]
            try:
                if self._copies and self._index in lost:
                    self._copies.fetch(step, held_by[step][self._index])
                abstract = without_used(layout, abstract_state(layout, optimizer))
                saved, state = self._read_or_fetch(step, newest, abstract, layout, listings)
                outcome = ["", certificate(saved.metadata, saved.data)]
            except (OSError, ValueError, KeyError, TypeError) as error:
                outcome = [
                    (
                        f"step {step} on process {self._index}: "
                        f"{error if isinstance(error, _Unusable) else repr(error)}"
                    ),
                    "",
                ]
            problems, proofs = zip(*distributed.gather_from_all(outcome), strict=True)
            reason = next(filter(None, problems), "")
            if not reason and len(set(proofs)) > 1:
                reason = f"step {step} is not of the same run on all processes"
            if not reason and saved and state and (wrong := _differ(digests(state), saved.digests)):
                reason = f"step {step}: {wrong} differs from what was saved"
            if not reason and saved and state:
                distributed.print_on_process0(
                    (
                        f"step {step} is on the local disks of all processes ({self.directory}), "
                        "newer than the output's checkpoints"
                    )
                    + (f"; fetched from other nodes: {number_ranges(lost)}" if lost else "")
                )
                if reasons:
                    distributed.print_on_process0(
                        f"newer local checkpoints are not used: {'; '.join(reasons)}"
                    )
                return saved, with_used(layout, state)
            reasons.append(reason)
        if reasons:
            distributed.print_on_process0(f"local checkpoints are not used: {'; '.join(reasons)}")
        self.forget(newest)
        return None

    def _read_or_fetch(
        self,
        step: int,
        newest: int,
        abstract: State,
        layout: ModelLayout,
        listings: list[list[Any]],
    ) -> tuple[SavedCheckpoint, State]:
        """As `_read`, but replaces damaged files that were here at the start by a copy of another
        node, if there is one.
        """
        try:
            return self._read(step, newest, abstract, layout)
        except (OSError, ValueError) as error:
            holders = {
                other
                for other, listing in enumerate(listings)
                for each, of in listing
                if each == step and self._index in of
            }
            different = isinstance(error, _Unusable) and not isinstance(error, _Damaged)
            if (
                not self._copies
                or different
                or self._index not in holders
                or not (others := holders - self._copies.node)
            ):
                raise
            self._copies.fetch(step, min(others))
            print(
                (
                    f"{distributed.log_prefix()}warning: step {step} in {self.directory}: {error}; "
                    "fetched from another node"
                ),
                flush=True,
            )
        # not within the handler, which keeps the arrays that were read so far
        return self._read(step, newest, abstract, layout)

    def forget(self, after: int) -> None:
        """Removes the steps after `after` from this node, because the run was rolled back."""
        if self._every:
            self._finish()
            if self._copies:
                self._copies.cancel()
            for step, processes in self._steps().items():
                for process in processes if step > after else []:
                    self._remove(step, process)

    def close(self) -> None:
        """Waits for the current save. A copy that is being sent is given up."""
        self._finish()
        if self._copies:
            self._copies.close()

    def _finish(self) -> bool:
        """Waits for the current write. Returns whether it ended in time."""
        if self._thread:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                self._warn(f"the disk has not written the previous one in {_PATIENCE:g} s")
                return False
            self._thread = None
        return True

    def _write(self, step: int, parts: Shards, about: dict[str, Any]) -> None:
        place = self._place(step, self._index)
        try:
            shutil.rmtree(place, ignore_errors=True)  # from before a restart
            place.mkdir(parents=True)
            about["parts"] = {}
            with (place / _ARRAYS).open("wb") as file:
                for leaf, distinct in parts.items():
                    about["parts"][leaf] = {}
                    for index, x in distinct.items():
                        about["parts"][leaf][index] = [file.tell(), *x.shape, host_digest(x)]
                        file.write(np.atleast_1d(x).reshape(-1).view(np.uint8).data)
                flush(file)
            with (place / f"{_DESCRIPTION}.writing").open("w", encoding="utf-8") as file:
                json.dump(about | {"sha256": _sha256(about)}, file)
                flush(file)
            (place / f"{_DESCRIPTION}.writing").rename(place / _DESCRIPTION)
            sync(place)
            self._failed = False
            self._prune(self._index)
            if self._copies:
                self._copies.send(step)
        except OSError as error:
            self._remove(step, self._index)
            self._warn(f"{error.strerror or error}")

    def _warn(self, reason: str) -> None:
        """Prints a warning, once until a save succeeds again."""
        if not self._failed:
            with contextlib.suppress(OSError):  # the log may be on the same disk
                print(
                    f"{distributed.log_prefix()}warning: no local checkpoint in {self.directory}: "
                    f"{reason}; training continues, and a crash now rolls back to the newest "
                    "checkpoint in the output", flush=True,
                )  # fmt: skip
        self._failed = True

    def _place(self, step: int, process: int) -> Path:
        return self.directory / str(step) / f"{process}{self._of}"

    def _steps(self) -> dict[int, list[int]]:
        """Returns {step: processes whose files are here, complete or not}, ascending: this one's,
        with copies those of all others, too.
        """
        found: dict[int, list[int]] = {}
        with contextlib.suppress(OSError):
            for path in self.directory.glob(
                f"*/*{self._of}" if self._copies else f"*/{self._index}{self._of}"
            ):
                process = path.name.removesuffix(self._of)
                if names_a_step(path.parent.name) and process.isdecimal():
                    found.setdefault(int(path.parent.name), []).append(int(process))
        return {step: sorted(found[step]) for step in sorted(found)}

    def _complete(self) -> dict[int, list[int]]:
        """Returns what of `_steps` is complete."""
        found = {
            step: [i for i in holds if (self._place(step, i) / _DESCRIPTION).exists()]
            for step, holds in self._steps().items()
        }
        return {step: holds for step, holds in found.items() if holds}

    def _prune(self, process: int) -> None:
        """Removes the older steps of a process from this node, and those of processes that do not
        send their steps here any more.
        """
        complete = self._complete()
        own = [step for step, holds in complete.items() if process in holds]
        for step in own[:-_KEEP]:
            self._remove(step, process)
        if self._copies and process == self._index and own:
            for step, holds in complete.items():
                for other in holds if step < own[-_KEEP:][0] else []:
                    if other not in self._copies.kept_here:
                        self._remove(step, other)

    def _remove(self, step: int, process: int) -> None:
        place = self._place(step, process)
        with contextlib.suppress(OSError):
            clear(place)
            place.parent.rmdir()

    def _read(
        self, step: int, newest: int, abstract: State, layout: ModelLayout
    ) -> tuple[SavedCheckpoint, State]:
        """Reads and verifies a step. Raises _Unusable, or any error that a foreign description
        causes.
        """
        place = self._place(step, self._index)
        about = strict_json.read(place / _DESCRIPTION)
        if about.pop("sha256", None) != _sha256(about) or about["step"] != step:
            raise _Damaged(f"{_DESCRIPTION} was changed after it was written")
        if about["layout"] != (expected := _layout(abstract, layout)):
            raise _Unusable(f"it has different {_differ(expected, about['layout'])}")
        if (durable := about["metadata"].get("durable")) is not None and durable > newest:
            raise _Unusable(
                f"it was saved when the output had step {durable}, which is missing now"
            )
        with (place / _ARRAYS).open("rb") as file:
            leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
            state = jax.tree.unflatten(
                tree,
                [
                    _leaf(file, about["parts"][leaf_name(path)], leaf_name(path), leaf)
                    for path, leaf in leaves
                ],
            )
        return SavedCheckpoint(self.directory, step, about["data"], about["metadata"]), state


def _holders(listings: list[list[Any]]) -> dict[int, list[int]]:
    """Returns {step: for each process the one that has its files, itself if possible} for the steps
    of which nothing is missing.

    listings: what each process sees, [[step, [process, ...]], ...].
    """
    found: dict[int, dict[int, int]] = {}
    for holder, listing in enumerate(listings):
        for step, processes in listing:
            for process in processes:
                if process == holder or process not in found.setdefault(step, {}):
                    found.setdefault(step, {})[process] = holder
    every = range(len(listings))
    return {
        step: [of[process] for process in every]
        for step, of in found.items()
        if all(process in of for process in every)
    }


class _Unusable(ValueError):
    """A local step cannot be used."""


class _Damaged(_Unusable):
    """Its files have other bytes than were written."""


def _leaf(
    file: Any, parts: dict[str, list[Any]], name: str, abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    def part(index: str) -> np.ndarray:
        if index not in parts:
            raise _Unusable(f"{name} is sharded differently")
        offset, *shape, proof = parts[index]
        file.seek(offset)
        raw = np.fromfile(file, jnp.dtype(abstract.dtype), int(np.prod(shape)))
        if raw.size != np.prod(shape) or host_digest(found := raw.reshape(shape)) != proof:
            raise _Damaged(f"{name} is damaged in {_ARRAYS}")
        return found

    return assembled(abstract, part)


def _layout(state: State, layout: ModelLayout) -> dict[str, Any]:
    """Returns what must be equal at a restore, as JSON, for arrays or jax.ShapeDtypeStruct.
    Shardings show in the parts' indices.
    """
    leaves = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaves[leaf_name(path)] = [str(x.dtype), *x.shape]
    stages = [[name, stack.stages, *stack.layer_counts] for name, stack in layout.stacks.items()]
    sizes = dict(layout.shard.mesh.shape)
    flat = [
        [
            v.name,
            v.replica_axes,
            v.shard_axes,
            [[m.name, m.offset, *m.local, str(layout.flat.specs[m.name])] for m in v.matrices],
        ]
        for v in layout.flat.vectors
    ]
    about = {
        "mesh sizes": sizes,
        "processes": jax.process_count(),
        "stages": stages,
        "leaves": leaves,
        "flat vectors": flat,
    }
    return json.loads(json.dumps(about))


def _differ(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Returns the first key whose values differ, or ""."""
    return next((key for key in [*a, *b] if a.get(key) != b.get(key)), "")


def _sha256(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _identity(directory: Path) -> str:
    """Returns eight hex digits stored with the durable checkpoints, so that a run that starts from
    scratch ignores older local steps.
    """
    mark, new = directory / _MARK, secrets.token_hex(4)
    try:
        if jax.process_index() == 0 and not mark.exists():
            mark.write_text(f"{new} {_check(new)}", encoding="utf-8")
        life, _, check = mark.read_text(errors="replace", encoding="utf-8").partition(" ")
        if _LIFE.fullmatch(life) and check in ("", _check(life)):  # older versions wrote no check
            return life
        if jax.process_index() == 0:
            print(
                f"warning: {mark} is damaged: nothing says whose the local checkpoints are, and "
                "none is used"
            )
            mark.write_text(f"{new} {_check(new)}", encoding="utf-8")
    except OSError:
        pass
    return new


def _check(life: str) -> str:
    return hashlib.sha256(life.encode()).hexdigest()[:8]
