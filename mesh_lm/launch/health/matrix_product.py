"""A program: multiplies two matrices of small integers on each device and compares the digest of
the product with the known one.

All sums are integers below 2^24, so fp32, TF32 and bf16 with any order of summation give the same
bits on any hardware. It is run as a file, without the package: `python matrix_product.py gpu` (by
JAX, on all devices that it sees), or `cpu` (by NumPy).

It prints "devices N S": their number, and the seconds until they were found; then "compiled S",
when the first device has its program; then "N ok", "N failed: why" or "N unknown: why" for each.
"""

import hashlib
import re
import sys
import time
from typing import Any

import numpy as np

DIGESTS = {
    512: "91da6bba4ff9b7db2061377185fb592ae4799cece0d598a161590878c830fe09",
    4096: "e65d0e69613199bb17a0cc67402b63b5d499c447c2ef4eac6792124a83933859",
}
"""Rows of the matrices -> SHA-256 of the product as int32."""
_FAULTS = re.compile(
    r"ILLEGAL_ADDRESS|illegal memory access|ECC|[Uu]ncorrectable|LAUNCH_FAILED|unspecified "
    r"launch "
    r"failure|LAUNCH_TIMEOUT"
)
"""What errors of a faulty device say. Others, such as a lack of memory that another process holds,
are no fault of the hardware."""
_BEGAN = time.monotonic()


def matrices(size: int) -> tuple[np.ndarray, ...]:
    """Returns two matrices of integers from -7 to 7, as fp32."""
    i, j = np.ogrid[:size, :size]
    return tuple(
        ((i * 7919 + j * 31 + i * j * factor) % 65537 % 15 - 7).astype(np.float32)
        for factor in (3, 5)
    )


def is_right(product: Any) -> bool:
    """Whether a product of `matrices` is exact."""
    found = np.asarray(product)
    return hashlib.sha256(found.astype(np.int32).tobytes()).hexdigest() == DIGESTS[len(found)]


def verdict(product: Any) -> str:
    """Returns ok, or failed and why."""
    return "ok" if is_right(product) else "failed: its matrix product is wrong"


def what_failed(error: Exception) -> str:
    """Returns failed and the error if its text shows a fault of the device, else unknown and the
    error.
    """
    text = " ".join(str(error).split())
    return f"{'failed' if _FAULTS.search(text) else 'unknown'}: {text[:200]}"


def by_numpy() -> None:
    """Multiplies on the CPU, which does not need JAX."""
    say("devices 1")
    a, b = matrices(512)
    say(f"0 {verdict(a @ b)}")


def by_jax(platform: str = "gpu", size: int = 4096) -> None:
    """Multiplies by JAX, on all devices of a platform at once."""
    import jax

    devices = [device for device in jax.local_devices() if device.platform == platform]
    say(f"devices {len(devices)}")
    a, b = matrices(size)
    running, compiled = [], False
    for device in devices:
        try:
            here = jax.device_put(a, device), jax.device_put(b, device)
            product = jax.jit(jax.numpy.matmul).lower(*here).compile()
            if not compiled:
                say("compiled")
                compiled = True
            running.append(product(*here))
        except Exception as error:
            running.append(error)
    for i, product in enumerate(running):
        try:
            if isinstance(product, Exception):
                raise product
            say(f"{i} {verdict(product)}")
        except Exception as error:
            say(f"{i} {what_failed(error)}")


def say(text: str) -> None:
    """Prints a line at once, with the seconds since the start if it is about all devices."""
    print(text if text[0].isdigit() else f"{text} {time.monotonic() - _BEGAN:.1f}", flush=True)


if __name__ == "__main__":
    by_jax() if sys.argv[1] == "gpu" else by_numpy()
