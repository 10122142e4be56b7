"""A program: multiplies two matrices of small integers on each device and compares the digest of
the product with the known one.

All sums are integers below 2^24, so fp32, TF32 and bf16 with any order of summation give the same
bits on any hardware. It is run as a file, without the package: `python matrix_product.py gpu` (with
JAX, on all devices that it sees), or `cpu` (with NumPy).

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
    r"ILLEGAL_ADDRESS|illegal memory access|ECC|[Uu]ncorrectable|LAUNCH_FAILED"
    r"|unspecified launch failure|LAUNCH_TIMEOUT"
)
"""Texts in the errors of a faulty device. Others, such as a lack of memory that another process
holds, are no fault of the hardware."""
_LONGEST = 200
"""Characters of an error that are printed."""
_STARTED_AT = time.monotonic()


def multiply_with_numpy() -> None:
    """Multiplies on the CPU, which does not need JAX."""
    say("devices 1")
    a, b = matrices(512)
    say(f"0 {verdict(a @ b)}")


def multiply_with_jax(platform: str = "gpu", size: int = 4096) -> None:
    """Multiplies on all devices of a platform at once."""
    import jax

    devices = [device for device in jax.local_devices() if device.platform == platform]
    say(f"devices {len(devices)}")
    a, b = matrices(size)

    # All products are started before the first is waited for.
    products: list[Any] = []  # or the error
    compiled = False
    for device in devices:
        try:
            factors = (jax.device_put(a, device), jax.device_put(b, device))
            product = jax.jit(jax.numpy.matmul).lower(*factors).compile()
            if not compiled:
                say("compiled")
                compiled = True
            products.append(product(*factors))
        except Exception as error:
            products.append(error)
    for i, product in enumerate(products):
        try:
            if isinstance(product, Exception):
                raise product
            say(f"{i} {verdict(product)}")
        except Exception as error:
            say(f"{i} {error_verdict(error)}")


def matrices(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two matrices of integers from -7 to 7, as fp32."""
    return _matrix(size, 3), _matrix(size, 5)


def _matrix(size: int, factor: int) -> np.ndarray:
    i, j = np.ogrid[:size, :size]
    integers = (i * 7919 + j * 31 + i * j * factor) % 65537 % 15 - 7
    return integers.astype(np.float32)


def is_exact(product: Any) -> bool:
    """Whether a product of `matrices` is the known one."""
    product = np.asarray(product)
    digest = hashlib.sha256(product.astype(np.int32).tobytes()).hexdigest()
    return digest == DIGESTS[len(product)]


def verdict(product: Any) -> str:
    """Returns ok, or failed and why."""
    return "ok" if is_exact(product) else "failed: its matrix product is wrong"


def error_verdict(error: Exception) -> str:
    """Returns failed and the error if its text shows a fault of the device, else unknown and the
    error.
    """
    text = " ".join(str(error).split())
    outcome = "failed" if _FAULTS.search(text) else "unknown"
    return f"{outcome}: {text[:_LONGEST]}"


def say(text: str) -> None:
    """Prints a line at once, with the seconds since the start if it is about all devices."""
    is_about_one_device = text[0].isdigit()
    if not is_about_one_device:
        text = f"{text} {time.monotonic() - _STARTED_AT:.1f}"
    print(text, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "gpu":
        multiply_with_jax()
    else:
        multiply_with_numpy()
