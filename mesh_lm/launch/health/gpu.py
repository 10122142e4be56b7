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
Ask = Callable[..., str]


def nvidia_smi(tool: str, environment: Mapping[str, str]) -> Ask:
    """Returns a function that runs nvidia-smi with the given words and returns what it prints. It
    raises RuntimeError if that fails.
    """

    def ask(*words: str) -> str:
        status, text = run([tool, *words], environment, _LIMIT)
        if status is None:
            raise RuntimeError(f"nvidia-smi did not answer within {_LIMIT:g} s")
        if status:
            raise RuntimeError(f"nvidia-smi ended with status {status}: {' '.join(text.split())}")
        return text

    return ask


class Gpus:
    """The GPUs of a node that its workers see."""

    def __init__(self, ask: Ask, environment: Mapping[str, str]) -> None:
        """ask: as `nvidia_smi` returns it. environment: CUDA_VISIBLE_DEVICES limits the GPUs that
        are checked.
        """
        self._ask, self._visible = ask, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._most, self._active = 0, dict[str, int]()
        # Xid -> when it was first reported, in seconds since the boot
        self._reported: dict[tuple[str, ...], float] = {}
        self.count: int | None = None
        """The number that `memory` found last; None: nvidia-smi did not say."""

    def memory(self) -> Result:
        """Returns failed if a GPU is missing, has uncorrected ECC errors since the driver started,
        or must remap memory rows.
        """
        self.count = None
        try:
            gpus = self._query("ecc.errors.uncorrected.volatile.total")
            pending = self._remapped()
        except RuntimeError as error:
            lost = any(text in str(error) for text in _LOST)
            return (
                "failed" if lost else "unknown"
            ), f"{error}{'; reboot the node' if lost else ''}"
        self.count = len(gpus)
        before, self._most = self._most, max(self._most, len(gpus))
        if len(gpus) < before:
            return "failed", f"{len(gpus)} of {before} GPUs are left: reboot the node"
        wrong = []
        for index, bus, errors in gpus:
            if errors.isdigit() and int(errors):
                wrong.append(
                    f"GPU {index} has {errors} uncorrected ECC errors: {_RESET.format(index)}"
                )
            if how := pending.get(bus):
                wrong.append(f"GPU {index} {how.format(_RESET.format(index))}")
        return ("failed", "; ".join(wrong)) if wrong else ("ok", f"{len(gpus)} GPUs")

    def clocks(self) -> Result:
        """Returns failed if the hardware slows a GPU down because it is too hot, or because its
        power supply asks for it.
        """
        reasons = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
        try:
            gpus = self._query(*(f"clocks_event_reasons.{reason}" for reason in reasons))
        except RuntimeError:  # the name in older drivers
            gpus = self._query(*(f"clocks_throttle_reasons.{reason}" for reason in reasons))
        wrong = [
            f"GPU {index} is slowed down {why}"
            for index, _, hot, brake in gpus
            for state, why in (
                (hot, "because it is too hot: check the cooling"),
                (brake, "by its power brake: check the power supply"),
            )
            if state == "Active"
        ]
        return ("failed", "; ".join(wrong)) if wrong else ("ok", f"{len(gpus)} GPUs")

    def nvlink(self) -> Result:
        """Returns failed if a GPU has fewer active NVLinks than before, or than most of at least
        four GPUs that have any.
        """
        active: dict[str, int] = {}
        visible = {index for index, *_ in self._query()}
        for line in self._ask("nvlink", "--status").splitlines():
            if found := re.match(r"GPU (\d+):", line):
                index = found[1]
            elif re.match(r"\s*Link \d+: [\d.]+ GB/s", line):
                active[index] = active.get(index, 0) + 1
            elif re.match(r"\s*Link \d+:", line):
                active.setdefault(index, 0)
        active = {index: count for index, count in active.items() if index in visible}
        linked = [count for count in active.values() if count]  # cards without a bridge have none
        usual, often = Counter(linked).most_common(1)[0] if linked else (0, 0)
        expected = usual if len(linked) >= 4 and often > len(linked) / 2 else 0
        wrong = []
        for index, count in active.items():
            if count < (wanted := max(expected if count else 0, self._active.get(index, 0))):
                wrong.append(f"GPU {index} has {count} of {wanted} NVLinks: {_RESET.format(index)}")
        self._active = {
            index: max(count, self._active.get(index, 0)) for index, count in active.items()
        }
        return ("failed", "; ".join(wrong)) if wrong else ("ok", f"{sum(active.values())} links")

    def xids(self, lines: Iterable[str], now: float) -> Result:
        """Returns failed if the kernel's log has a recent Xid of the hardware. lines: as in
        /dev/kmsg. now: seconds since the boot.

        Each Xid counts for a while only, because nothing clears the log when the GPU was reset. A
        fault that lasts fails other checks.
        """
        try:
            # GPUs that are not listed may have been lost
            hidden = {_slot(row[2]) for row in self._rows() if not self._sees(*row[:2])}
        except RuntimeError:
            hidden = set()
        wrong, reported = {}, {}
        for line in lines:
            head, _, text = line.partition(";")
            found = re.match(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)", text)
            if not found or int(found[2]) not in XIDS or _slot(found[1]) in hidden:
                continue
            if (age := now - int(head.split(",")[2]) / 1e6) >= RECENT:
                continue
            first = reported[found[1], found[2], head] = self._reported.get(
                (found[1], found[2], head), now
            )
            if now - first < COUNTS:
                wrong[found[1], found[2]] = (
                    f"GPU at {found[1]}: Xid {found[2]} {age:.0f} s ago ({XIDS[int(found[2])]})"
                )
        self._reported = reported
        return (
            ("failed", f"{'; '.join(wrong.values())}: reset the GPU, or reboot the node")
            if wrong
            else ("ok", "no Xid")
        )

    def kernel_log(self, path: Path = Path("/dev/kmsg")) -> Result:
        """As `xids`, for this node. Raises PermissionError if this process may not read its log."""
        lines, descriptor = [""], os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                try:
                    if not (record := os.read(descriptor, 8192)):
                        break
                    lines.append(record.decode("utf-8", "replace"))
                except BrokenPipeError:  # the oldest record was overwritten meanwhile
                    continue
                except BlockingIOError:
                    break
        finally:
            os.close(descriptor)
        return self.xids(lines, time.monotonic())

    def _query(self, *fields: str) -> list[list[str]]:
        """Returns [index, bus, *fields] of each visible GPU."""
        return [
            [index, *rest] for index, uuid, *rest in self._rows(*fields) if self._sees(index, uuid)
        ]

    def _rows(self, *fields: str) -> list[list[str]]:
        """Returns [index, uuid, bus, *fields] of each GPU of the node."""
        lines = self._ask(
            f"--query-gpu={','.join(['index', 'uuid', 'pci.bus_id', *fields])}",
            "--format=csv,noheader,nounits",
        ).splitlines()
        rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]
        if any(len(row) != 3 + len(fields) for row in rows):
            raise RuntimeError(f"nvidia-smi printed something else than was asked for: {lines[0]}")
        return [[index, uuid, bus.upper(), *rest] for index, uuid, bus, *rest in rows]

    def _sees(self, index: str, uuid: str) -> bool:
        # unset, or parts of a GPU
        if not all(re.fullmatch(r"\d+|GPU-[0-9a-f-]+", name) for name in self._visible):
            return True
        return any(
            name == index or (name.startswith("GPU-") and uuid.startswith(name))
            for name in self._visible
        )

    def _remapped(self) -> dict[str, str]:
        """Returns, for the bus of each GPU whose memory rows are or must be remapped, a phrase with
        room for what to do.
        """
        fields = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
        try:
            lines = self._ask(
                f"--query-remapped-rows={fields}", "--format=csv,noheader"
            ).splitlines()
        except RuntimeError:  # GPUs before Ampere do not remap rows
            return {}
        found = {}
        for bus, pending, failure in (line.split(",") for line in lines if line.count(",") == 2):
            if _yes(failure):
                found[bus.strip().upper()] = "could not remap a bad memory row: replace it"
            elif _yes(pending):
                found[bus.strip().upper()] = "has memory rows to remap: {}"
        return found


def _yes(text: str) -> bool:
    text = text.strip()
    return text == "Yes" or (text.isdigit() and text != "0")


def _slot(bus: str) -> tuple[int, ...]:
    """Returns domain, bus and device of 0000:1a:00 or 00000000:1A:00.0."""
    return tuple(int(part, 16) for part in bus.partition(".")[0].split(":"))
