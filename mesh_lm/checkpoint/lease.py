"""The lease of a run's output directory: a file that names its holder, and which the holder renews.

At most one run writes in a directory. The file needs exclusive creation and rename, which NFS has;
it uses no locks and compares no clocks of two hosts. A holder that is dead on this machine is stale
at once. Any other is stale after it has not renewed the lease for `STALE` seconds of this process's
own clock. The holder reads the lease before each commit of a checkpoint, so that a run that was
suspended and has lost it commits no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_type_hints

import jax

from mesh_lm import distributed, strict_json
from mesh_lm.errors import ConfigError, ReplacedError, StorageError
from mesh_lm.network.environment import GENERATION

RENEW = 5.0
"""Seconds between renewals."""
STALE = 30.0
"""Seconds without a renewal after which a holder on another machine has lost the lease."""
_RESTART_PATIENCE = 120.0
"""Seconds that a restarted run waits for processes of the earlier start that are alive, perhaps on
a host without a network."""
_POLL = 1.0
_SIZE = 512
"""Bytes of the file: renewing it must not need space on a full disk."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """The content of a lease file."""

    host: str
    pid: int
    machine: str
    """Boot and process namespace: where two of them agree, both see the same process ids."""
    started: int
    """When the process started, in clock ticks since the boot (0: unknown), because process ids are
    used again."""
    since: float
    """Unix time at which it took the lease."""
    life: str
    """Random digits that no other holder has."""
    renewed: int = 0

    @classmethod
    def this_process(cls) -> Holder:
        """Returns a new holder with a life of its own."""
        pid = os.getpid()
        status = _process_status(pid)
        return cls(
            host=socket.gethostname(),
            pid=pid,
            machine=_machine(),
            started=status.started if status else 0,
            since=time.time(),
            life=secrets.token_hex(4),
        )

    @property
    def alive(self) -> bool | None:
        """Whether its process is alive; None if it is on another machine."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # it belongs to another user
        status = _process_status(self.pid)
        return status is None or (status.state not in "ZX" and status.started == self.started)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"

    def encoded(self) -> bytes:
        """Returns the content of the file."""
        return json.dumps(dataclasses.asdict(self)).encode().ljust(_SIZE - 1) + b"\n"


_FIELD_TYPES = get_type_hints(Holder)


class Lease:
    """The lease that this process holds. A thread renews it until `release`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        """Call `acquire` instead."""
        self.path = path
        self._holder = holder
        self._lost: ReplacedError | None = None
        self._released = threading.Event()
        self._renewal_lock = threading.Lock()  # `require` renews it, too
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self._thread.start()

    @property
    def life(self) -> str:
        """Eight hex digits of this holder alone."""
        return self._holder.life

    @classmethod
    def acquire(
        cls, output: Path, patience: float = 0.0, *, wait: Callable[[float], object] = time.sleep
    ) -> Lease:
        """Returns the lease of a directory, which must exist.

        If it is unclear whether the holder is alive, waits up to `STALE` seconds, and prints that.

        Args:
          patience: seconds to wait for a live holder to end, for a restart whose processes are
            perhaps still ending elsewhere.
          wait: sleeps.

        Raises:
          ConfigError: another run holds it; the message names its host, process and time.
          StorageError: the same, after `patience` seconds.
          OSError: the directory is not writable.
        """
        path = output / ".lease"
        successor = Holder.this_process()
        last_content = b""
        # Only seconds in `wait` count, not those in which a disk did not answer, and in which a
        # holder could not renew the lease either.
        silence = 0.0
        waited = 0.0
        while not _create(path, successor.encoded()):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                content = b""  # it was released just now
            holder = _decode(content)
            alive = holder.alive if holder else None
            # Also if it cannot be decoded: a later version may write another file.
            was_renewed = last_content != b"" and content not in (b"", last_content)
            if content != last_content:
                silence = 0.0
            last_content = content

            if alive is False or silence >= STALE:
                abandoned = silence >= 2 * STALE
                if _replace(path, content, successor.encoded(), abandoned=abandoned):
                    break
            is_live = bool(alive) or was_renewed
            if is_live and waited >= patience:
                message = _refusal(output, path, holder)
                # A restart may be tried again later, which StorageError's exit status says.
                raise StorageError(message) if patience else ConfigError(message)
            if not waited:
                _announce_wait(output, holder, is_live, patience)
            wait(_POLL)
            silence += _POLL
            waited += _POLL
        return cls(path, successor)

    def require(self) -> None:
        """Reads and renews the lease.

        Raises ReplacedError if another run holds it, and OSError if it cannot be read.
        """
        self.raise_if_lost()
        self._renew()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raises ReplacedError if the last renewal showed that another run holds the lease.

        It reads nothing.
        """
        if self._lost:
            raise self._lost

    def release(self) -> None:
        """Ends the lease. Calling it again has no effect."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            holder = _decode(self.path.read_bytes())
            if holder and holder.life == self.life:
                self.path.unlink()

    def _keep_renewing(self) -> None:
        while not self._released.wait(RENEW) and not self._lost:
            # A disk may be away for a while, and a thread that ended would lose the lease.
            with contextlib.suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        """Renews the lease, or sets `_lost` if another run holds it.

        It writes into the file that it has read: if that was renamed away in between, the lease of
        another run is not touched.
        """
        with self._renewal_lock:
            try:
                with self.path.open("r+b") as file:
                    content = file.read()
                    holder = _decode(content)
                    if holder and holder.life == self.life:
                        renewal = dataclasses.replace(holder, renewed=holder.renewed + 1)
                        file.seek(0)
                        file.write(renewal.encoded())
                        return
                damaged = holder is None
                if damaged and _replace(self.path, content, self._holder.encoded()):
                    return
            except FileNotFoundError:
                holder = None  # it was deleted
            if holder is None and _create(self.path, self._holder.encoded()):
                return
            if holder is None:
                holder = _decode(self.path.read_bytes())
            if holder is None:
                raise OSError(f"{self.path} does not name the run that writes here")
            self._lost = ReplacedError(
                f"{self.path.parent} was taken over by {holder} while this run was suspended; this "
                "run writes no more"
            )


def acquire_on_process0(output: Path) -> Lease | None:
    """Returns the lease of a run's output on process 0, and None on the others.

    Raises ConfigError on all processes if another run holds it.
    """
    restarted = (
        int(os.environ.get(GENERATION, 1)) > 1 or int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    )
    # Any pod may be a replacement, whose predecessor's node does not answer.
    restarted |= "KUBERNETES_SERVICE_HOST" in os.environ
    # Connects the processes: a first collective after a long wait would time out.
    distributed.gather_from_all(0)
    lease = None
    with distributed.collective_errors():
        if jax.process_index() == 0:
            try:
                output.mkdir(parents=True, exist_ok=True)
                lease = Lease.acquire(output, _RESTART_PATIENCE if restarted else 0.0)
            except OSError as error:
                raise ConfigError(
                    f"cannot take {output} as the output of this run: {error.strerror}"
                ) from error
    return lease


def _create(path: Path, content: bytes) -> bool:
    """Creates the file and returns True, or returns False if it exists.

    Raises OSError, and then leaves nothing.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _replace(path: Path, expected: bytes, content: bytes, *, abandoned: bool = False) -> bool:
    """Replaces the lease if it still has the `expected` content, and returns whether it did.

    Only one process at a time can create the successor's file, and it then reads the lease again;
    so a slow one cannot replace a lease that is newer than the one it has read. The file of a
    successor that was killed in between is removed, so that the next call can succeed.

    Args:
      abandoned: whether the successor's file, if it exists, has existed for long enough.
    """
    successor = path.with_name(f"{path.name}.next")
    if not _create(successor, content):
        with contextlib.suppress(FileNotFoundError):
            other = _decode(successor.read_bytes())
            if abandoned or (other and other.alive is False):
                successor.unlink()
        return False
    try:
        if path.read_bytes() == expected:
            os.replace(successor, path)
            return True
    except OSError as error:
        successor.unlink(missing_ok=True)
        if not isinstance(error, FileNotFoundError):  # otherwise it was released just now
            raise
    else:
        successor.unlink(missing_ok=True)
    return False


def _decode(content: bytes) -> Holder | None:
    """Returns the holder that a lease file names.

    None: the file is damaged, or empty because it is just being created.
    """
    try:
        fields = strict_json.loads(content)
        holder = Holder(**{name: fields[name] for name in _FIELD_TYPES})
    except (ValueError, KeyError):
        return None
    for name, kind in _FIELD_TYPES.items():
        if type(getattr(holder, name)) is not kind:
            return None
    return holder


def _refusal(output: Path, path: Path, holder: Holder | None) -> str:
    if holder and holder.pid == os.getpid() and holder.machine == _machine():
        return (
            f"{output} is in use by an earlier call in this process, which has not ended; end it, "
            "or set output to another directory"
        )
    return (
        f"{output} is in use: {holder or 'an unknown process'} writes its checkpoints there; end "
        "that run, or set output to another directory. If you are certain that it no longer runs, "
        f"delete {path}"
    )


def _announce_wait(output: Path, holder: Holder | None, is_live: bool, patience: float) -> None:
    if is_live:
        limit = f"at most {patience:g} s for its end"
    else:
        limit = f"up to {max(STALE, patience):g} s to see whether it is alive"
    with contextlib.suppress(OSError):  # the log may be on a full disk
        print(
            f"{output} is in use by {holder or 'an unknown process'}; waiting {limit}", flush=True
        )


def _machine() -> str:
    """Returns a text that two processes have in common if they see the same process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"host {socket.gethostname()}"  # not Linux


class _ProcessStatus(NamedTuple):
    state: str
    """As in /proc/PID/stat, such as "S"; Z is a zombie, X a dead process."""
    started: int
    """Clock ticks since the boot."""


def _process_status(pid: int) -> _ProcessStatus | None:
    """Returns the status of a process; None if that cannot be known here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        # The name, in parentheses, may have spaces and parentheses.
        fields = stat.rpartition(")")[2].split()
        return _ProcessStatus(state=fields[0], started=int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None
