"""Samples the GPU's power during the suite in the background, from NVML: through pynvml if
installed, else through nvidia-smi."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

EVERY = 0.1
"""Seconds between samples. On Hopper power.draw is a mean over one second, so the instantaneous
value is used."""
QUERY = (
    "nvidia-smi",
    "--query-gpu=power.draw.instant,clocks.sm,temperature.gpu",
    "--format=csv,noheader,nounits",
    "-i",
    "0",
)
Sample = tuple[float, float, float]
"""Watts, MHz of the multiprocessors, degrees Celsius."""


class Power:
    """A context manager that collects samples. Without an NVIDIA driver it has none, and nothing
    fails."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, Sample]] = []
        """(time.time(), values) of each sample."""
        self._over = threading.Event()

    def __enter__(self) -> Power:
        threading.Thread(target=self._sample, daemon=True).start()
        return self

    def _sample(self) -> None:
        try:
            read = _pynvml() or _nvidia_smi
            while not self._over.wait(EVERY):
                start_time = time.time()
                sample = read()
                self.samples.append(((start_time + time.time()) / 2, sample))
        except Exception:  # no driver, or one without power readings
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def during(self, start_time: float, ended: float) -> dict[str, Any]:
        """Returns the means between two times of time.time(): watts, sm_mhz, celsius. Empty without
        three samples.

        The first 0.3 s are left out if three samples remain, because nvidia-smi's values lag.
        """
        inside = [sample for at, sample in self.samples if start_time <= at <= ended]
        late = [sample for at, sample in self.samples if start_time + 0.3 <= at <= ended]
        inside = late if len(late) >= 3 else inside
        if len(inside) < 3:
            return {}
        watts, clock, heat = (statistics.fmean(column) for column in zip(*inside, strict=True))
        return {"watts": watts, "sm_mhz": clock, "celsius": heat}


def _pynvml() -> Callable[[], Sample] | None:
    """Returns a reader through pynvml; None if it is not installed. Raises as NVML does without a
    GPU."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    nvml: Any = pynvml
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> Sample:
        (instant,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
        milliwatts = (
            nvml.nvmlDeviceGetPowerUsage(gpu) if instant.nvmlReturn else instant.value.uiVal
        )
        clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        return (
            milliwatts / 1e3,
            clock,
            nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        )

    return read


def _nvidia_smi() -> Sample:
    """Returns a sample from a new nvidia-smi process, because the output of a looping one may be
    buffered."""
    sample = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
    watts, clock, heat = map(float, sample.split(","))
    return watts, clock, heat
