"""Checks of a node's GPUs, from what nvidia-smi and the kernel report about them. Every driver
comes with nvidia-smi.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mesh_lm.launch.health.finding import Result
from mesh_lm.launch.health.limited import run

_LIMIT = 30.0
"""Seconds that nvidia-smi may take: without persistence mode it starts the driver first."""
_RESET = "reset the GPU (nvidia-smi --gpu-reset -i {}), or reboot the node"
_LOST = ("GPU is lost", "fallen off the bus", "Unable to determine the device handle")
XIDS = {
    48: "an uncorrectable memory error",
    62: "its microcontroller stopped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not respond",
    120: "its system processor failed",
    140: "an unrecovered memory error",
    143: "it failed to initialize",
}
"""Errors of the hardware, from NVIDIA's list of Xids. Others, such as 13, 31 and 43, are errors of
programs."""
RECENT = 600.0
"""Age in seconds of the oldest Xid that makes a node unhealthy."""
COUNTS = 120.0
"""Seconds for which it does, from the first check that finds it: less than a run waits for a node
to be healthy again."""
_RECORD = 8192
"""Bytes of a record of the kernel's log, at most."""
Ask = Callable[..., str]
"""Runs nvidia-smi with the given words, and returns what it prints."""


def nvidia_smi(tool: str, environment: Mapping[str, str]) -> Ask:
    """Returns a function that runs nvidia-smi. It raises RuntimeError if that fails."""

    def ask(*words: str) -> str:
        status, output = run([tool, *words], environment, _LIMIT)
        if status is None:
            raise RuntimeError(f"nvidia-smi did not answer within {_LIMIT:g} s")
        if status:
            raise RuntimeError(f"nvidia-smi ended with status {status}: {' '.join(output.split())}")
        return output

    return ask


class _Row(NamedTuple):
    """A row of nvidia-smi about one GPU."""

    index: str
    uuid: str
    bus: str
    values: list[str]
    """The fields that were queried."""


class Gpus:
    """The GPUs of a node that its workers see.

    Attributes:
      count: the number that `memory` found last; None: nvidia-smi did not say.
    """

    def __init__(self, ask: Ask, environment: Mapping[str, str]) -> None:
        """ask: as `nvidia_smi` returns it. environment: CUDA_VISIBLE_DEVICES limits the GPUs that
        are checked.
        """
        self._ask = ask
        self._visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._most_gpus = 0  # in any check so far
        self._most_links: dict[str, int] = {}  # index -> active NVLinks in any check so far
        self._xids_reported_at: dict[_Xid, float] = {}  # seconds since the boot
        self.count: int | None = None

    def memory(self) -> Result:
        """Returns failed if a GPU is missing, has uncorrected ECC errors since the driver started,
        or must remap memory rows.
        """
        self.count = None
        try:
            rows = self._query("ecc.errors.uncorrected.volatile.total")
            remaps = self._row_remaps()
        except RuntimeError as error:
            if any(text in str(error) for text in _LOST):
                return "failed", f"{error}; reboot the node"
            return "unknown", str(error)
        self.count = len(rows)
        n_expected = self._most_gpus
        self._most_gpus = max(self._most_gpus, len(rows))
        if len(rows) < n_expected:
            return "failed", f"{len(rows)} of {n_expected} GPUs are left: reboot the node"

        faults = []
        for row in rows:
            reset = _RESET.format(row.index)
            (n_errors,) = row.values
            if n_errors.isdigit() and int(n_errors):
                faults.append(f"GPU {row.index} has {n_errors} uncorrected ECC errors: {reset}")
            if row.bus in remaps:
                faults.append(f"GPU {row.index} {remaps[row.bus].format(reset)}")
        return _result(faults, f"{len(rows)} GPUs")

    def clocks(self) -> Result:
        """Returns failed if the hardware slows a GPU down because it is too hot, or because its
        power supply asks for it.
        """
        reasons = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
        try:
            rows = self._query(*(f"clocks_event_reasons.{reason}" for reason in reasons))
        except RuntimeError:  # the name in older drivers
            rows = self._query(*(f"clocks_throttle_reasons.{reason}" for reason in reasons))
        faults = []
        for row in rows:
            hot, brake = row.values
            if hot == "Active":
                faults.append(
                    f"GPU {row.index} is slowed down because it is too hot: check the cooling"
                )
            if brake == "Active":
                faults.append(
                    f"GPU {row.index} is slowed down by its power brake: check the power supply"
                )
        return _result(faults, f"{len(rows)} GPUs")

    def nvlink(self) -> Result:
        """Returns failed if a GPU has fewer active NVLinks than before, or than most of at least
        four GPUs that have any.
        """
        active = self._active_links()
        usual = _usual_number(list(active.values()))
        faults = []
        for index, n_links in active.items():
            n_expected = self._most_links.get(index, 0)
            if n_links:  # cards without a bridge have none
                n_expected = max(n_expected, usual)
            if n_links < n_expected:
                faults.append(
                    f"GPU {index} has {n_links} of {n_expected} NVLinks: {_RESET.format(index)}"
                )
        self._most_links = {
            index: max(n_links, self._most_links.get(index, 0)) for index, n_links in active.items()
        }
        return _result(faults, f"{sum(active.values())} links")

    def xids(self, lines: Iterable[str], uptime: float) -> Result:
        """Returns failed if the kernel's log has a recent Xid of the hardware.

        lines: as in /dev/kmsg. uptime: seconds since the boot.

        Each Xid counts for a while only, because nothing clears the log when the GPU was reset. A
        fault that lasts fails other checks.
        """
        hidden = self._hidden_slots()
        faults: dict[tuple[str, int], str] = {}
        reported_at = {}
        for line in lines:
            head, _, text = line.partition(";")
            match = re.match(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)", text)
            if not match:
                continue
            xid = _Xid(bus=match[1], number=int(match[2]), head=head)
            if xid.number not in XIDS or _slot(xid.bus) in hidden:
                continue
            age = uptime - int(head.split(",")[2]) / 1e6
            if age >= RECENT:
                continue
            first = self._xids_reported_at.get(xid, uptime)
            reported_at[xid] = first
            if uptime - first < COUNTS:
                faults[xid.bus, xid.number] = (
                    f"GPU at {xid.bus}: Xid {xid.number} {age:.0f} s ago ({XIDS[xid.number]})"
                )
        self._xids_reported_at = reported_at
        if faults:
            return "failed", f"{'; '.join(faults.values())}: reset the GPU, or reboot the node"
        return "ok", "no Xid"

    def kernel_log(self, path: Path = Path("/dev/kmsg")) -> Result:
        """Returns the result of `xids` for this node.

        Raises PermissionError if this process may not read its log.
        """
        lines = []
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                try:
                    record = os.read(descriptor, _RECORD)
                except BrokenPipeError:  # the oldest record was overwritten meanwhile
                    continue
                except BlockingIOError:
                    break
                if not record:
                    break
                lines.append(record.decode("utf-8", "replace"))
        finally:
            os.close(descriptor)
        return self.xids(lines, time.monotonic())

    def _query(self, *fields: str) -> list[_Row]:
        """Returns a row for each visible GPU."""
        return [row for row in self._rows(*fields) if self._sees(row)]

    def _rows(self, *fields: str) -> list[_Row]:
        """Returns a row for each GPU of the node."""
        query = ",".join(["index", "uuid", "pci.bus_id", *fields])
        listing = self._ask(f"--query-gpu={query}", "--format=csv,noheader,nounits")
        lines = listing.splitlines()
        rows = []
        for line in lines:
            if not line.strip():
                continue
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != 3 + len(fields):
                raise RuntimeError(
                    f"nvidia-smi printed something else than was asked for: {lines[0]}"
                )
            index, uuid, bus, *values = cells
            rows.append(_Row(index, uuid, bus.upper(), values))
        return rows

    def _sees(self, row: _Row) -> bool:
        # CUDA_VISIBLE_DEVICES is unset, or names parts of a GPU.
        if not all(re.fullmatch(r"\d+|GPU-[0-9a-f-]+", name) for name in self._visible):
            return True
        return any(
            name == row.index or (name.startswith("GPU-") and row.uuid.startswith(name))
            for name in self._visible
        )

    def _row_remaps(self) -> dict[str, str]:
        """Returns, for the bus of each GPU whose memory rows are or must be remapped, a phrase with
        room for what to do.
        """
        fields = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
        try:
            listing = self._ask(f"--query-remapped-rows={fields}", "--format=csv,noheader")
        except RuntimeError:  # GPUs before Ampere do not remap rows
            return {}
        remaps = {}
        for line in listing.splitlines():
            if line.count(",") != 2:
                continue
            bus, pending, failure = line.split(",")
            if _is_yes(failure):
                remaps[bus.strip().upper()] = "could not remap a bad memory row: replace it"
            elif _is_yes(pending):
                remaps[bus.strip().upper()] = "has memory rows to remap: {}"
        return remaps

    def _active_links(self) -> dict[str, int]:
        """Returns index -> the number of active NVLinks, for visible GPUs that have any."""
        visible = {row.index for row in self._query()}
        active: dict[str, int] = {}
        index = ""
        for line in self._ask("nvlink", "--status").splitlines():
            gpu = re.match(r"GPU (\d+):", line)
            if gpu:
                index = gpu[1]
            elif re.match(r"\s*Link \d+:", line):
                is_active = bool(re.match(r"\s*Link \d+: [\d.]+ GB/s", line))
                active[index] = active.get(index, 0) + is_active
        return {index: n_links for index, n_links in active.items() if index in visible}

    def _hidden_slots(self) -> set[tuple[int, ...]]:
        """Returns the slots of GPUs that belong to others.

        GPUs that nvidia-smi does not list are not among them: they may have been lost.
        """
        try:
            return {_slot(row.bus) for row in self._rows() if not self._sees(row)}
        except RuntimeError:
            return set()


class _Xid(NamedTuple):
    """A line of the kernel's log about an error of a GPU."""

    bus: str
    number: int
    head: str
    """Priority, sequence number and time of the line."""


def _result(faults: list[str], summary: str) -> Result:
    return ("failed", "; ".join(faults)) if faults else ("ok", summary)


def _usual_number(links: list[int]) -> int:
    """Returns the number of NVLinks that most of at least four linked GPUs have; 0: none."""
    linked = [n_links for n_links in links if n_links]
    if len(linked) < 4:
        return 0
    ((usual, n_gpus),) = Counter(linked).most_common(1)
    return usual if n_gpus > len(linked) / 2 else 0


def _is_yes(text: str) -> bool:
    text = text.strip()
    return text == "Yes" or (text.isdigit() and text != "0")


def _slot(bus: str) -> tuple[int, ...]:
    """Returns domain, bus and device of 0000:1a:00 or 00000000:1A:00.0."""
    return tuple(int(part, 16) for part in bus.partition(".")[0].split(":"))
