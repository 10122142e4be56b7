"""What the check of a compiled kernel says of one that the hardware cannot run, or runs slowly: a
sound kernel, changed in one place."""

import dataclasses
from typing import Any

import pytest

from pallas_kernels.dev.limits import faults
from pallas_kernels.dev.resources import KernelResources, TensorMap

COMPILE_BUDGET = 0

KEYS = TensorMap("bf16", (2050, 128, 2, 8, 64), (128, 2048, 64, 256, 1), (1, 16, 2, 8, 64), 128)
SOUND = KernelResources(
    name="flash_attention_forward", threads=384, registers=168, stack=0, spill_stores=0,
    spill_loads=0, static_shared=1,
    dynamic_shared=164_952, wgmma=32, tma_loads=7, tma_stores=1,
    set_registers=(("dec", 24), ("inc", 240)), warnings=(),
    barriers=(128, 256), grid=(8, 4, 2),
    tensor_maps=(KEYS, TensorMap("f32", (2, 4, 1024), (4096, 1024, 1), (1, 1, 64), 0)),
)  # fmt: skip
"""As compiled for heads of 128."""


def note(number: str, says: str) -> dict[str, Any]:
    return {
        "warnings": (
            f"ptxas info    : ({number}) {says} in around line 1509 by compiler in function 'f'",
        )
    }


def keys(**changes: Any) -> dict[str, Any]:
    return {"tensor_maps": (dataclasses.replace(KEYS, **changes),)}


CHANGES = {
    ("register budget: warpgroups that set 40, 248, 248 registers a thread need 68,608, and the "
    "block is launched with 64,512"): {
        "set_registers": (("dec", 40), ("inc", 248))
    },
    "register budget: warpgroups that set 240, 240, 240": {"set_registers": (("inc", 240),)},
    "registers: 384 threads of 176 are 67,584, and an SM has 65,536": {"registers": 176},
    "setmaxnreg: 20 is not a multiple of 8 from 24 to 256": {"set_registers": (("dec", 20), ("inc", 240))},
    "setmaxnreg: (('dec', 24), ('inc', 160)) does not fit the 168 registers at launch": {"set_registers": (("dec", 24), ("inc", 160))},
    "spills: 12 bytes": {"spill_stores": 8, "spill_loads": 4},
    "serialised: ptxas waits for each wgmma": note("C7512", "Potential Performance Loss: wgmma.mma_async instructions are serialized"),
    "serialised: ordinary instructions write": note("C7513", "non wgmma instructions defining input registers"),
    "drained: ptxas has put a wait": note("C7517", "warpgroup.wait is injected"),
    "serialised, without a number": {"warnings": ("wgmma.mma_async instructions are serialized due to something new",)},
    "shared memory: 232,449 bytes, and a block may have 232,448": {"dynamic_shared": 232_448},
    "barrier: 2 arrivals are no whole number of warpgroups": {"barriers": (128, 2)},
    "barrier: 1,048,576 arrivals are not from 1 to 1,048,575": {"barriers": (2**20,)},
    "grid: 70,000 blocks along z, and there may be 65,535": {"grid": (1, 1, 70_000)},
    "TMA of 1x16x2x8x64 from 2050x128x2x8x64 bf16: strides of 128, 2048, 63, 256, 1": keys(strides=(128, 2048, 63, 256, 1)),
    ("TMA of 1x16x2x8x64 from 2050x128x2x8x64 bf16: a row of 128 bytes is not a multiple of 16 up "
    "to the swizzle of 64"): keys(swizzle=64),
    "TMA of 1x16x2x8x60 from 2050x128x2x8x64 bf16: a row of 120 bytes is not": keys(box=(1, 16, 2, 8, 60)),
    "TMA of 1x512x2x8x64 from 2050x128x2x8x64 bf16: a box has 1 to 256": keys(box=(1, 512, 2, 8, 64)),
    "TMA of 1x16x2x8x64 from 2050x128x2x8x64 bf16: it begins 4 elements into": keys(offset=4),
    "TMA of 1x1x16x2x8x64 from 1x2050x128x2x8x64 bf16: 6 axes": keys(
        shape=(1, *KEYS.shape), strides=(0, *KEYS.strides), box=(1, *KEYS.box)
    ),
}  # fmt: skip


@pytest.mark.parametrize("says", CHANGES)
def test_a_kernel_beyond_a_limit_is_refused_by_name(says: str) -> None:
    [fault] = faults(dataclasses.replace(SOUND, **CHANGES[says]))
    assert fault.startswith(says)


def test_a_sound_kernel_has_no_fault_nor_has_an_injected_arrival() -> None:
    arrival = note("C7519", "warpgroup.arrive is injected")
    assert faults(SOUND) == faults(dataclasses.replace(SOUND, **arrival)) == []
    assert (
        faults(dataclasses.replace(SOUND, set_registers=(("dec", 24), ("inc", 240), ("inc", 240))))
        == []
    )


def test_a_grid_that_should_fill_the_gpu_has_a_block_for_each_sm() -> None:
    assert faults(SOUND, sms=64) == []
    assert faults(SOUND, sms=132) == ["grid: 64 blocks leave 68 of 132 SMs without work"]
