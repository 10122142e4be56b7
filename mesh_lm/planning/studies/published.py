"""What Megatron-LM has published of the models in configs/megatron_*.py, on H100s.

Both pictures are in the folder images of github.com/NVIDIA/Megatron-LM at commit d98e8a64dd.
"""

from __future__ import annotations

from typing import NamedTuple

TARGET = "h100"
"""The GPU on which all of it was measured."""


class Published(NamedTuple):
    """A row of a table of measurements."""

    gpus: int
    tflops: float
    """TFLOP/s of each GPU, by Megatron-LM's formula."""


WEAK = {
    "megatron_1_7b": Published(48, 408.8),
    "megatron_7_1b": Published(96, 465.9),
    "megatron_16b": Published(192, 489.1),
    "megatron_32b": Published(384, 459.6),
    "megatron_70b": Published(768, 419.7),
    "megatron_119b": Published(1536, 420.5),
    "megatron_177b": Published(2304, 432.8),
    "megatron_314b": Published(3072, 474.4),
    "megatron_462b": Published(6144, 459.9),
}
"""Config -> its row in model_table.png: the models grow with the number of GPUs."""

STRONG = {
    "megatron_177b": {
        96: 462.6,
        144: 462.1,
        288: 459.0,
        576: 456.3,
        1152: 448.5,
        2304: 435.2,
        3072: 425.2,
        4608: 414.2,
    }
}
"""Config -> GPUs -> TFLOP/s of each, with the same batch on all: strong_scaling.png, whose points
were read off the picture (within 0.6 %; the table has 432.8 where it shows 435.2)."""
