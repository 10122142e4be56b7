"""A self-test on the CPU, with a fault planted into the kernel: python planted.py FAULT '{"family":
..., "facts": ...}'"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")

from pallas_kernels.attention import self_test, xla  # noqa: E402
from pallas_kernels.trust import self_test as child  # noqa: E402

FAULT = sys.argv[1]


CALLS = []


def effect():
    """What the fault does each time the kernel runs; returns what is added to a factor of the
    result."""
    CALLS.append(FAULT)
    if FAULT == "hang":
        time.sleep(600)
    if FAULT == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    return np.float32(4e-3 if FAULT == "races" and len(CALLS) == 5 else 0)


def planted(*arrays, **how):
    if FAULT == "refused":
        raise NotImplementedError("no lowering for this version of jax")
    out, lse = xla.attend(*arrays, **how)
    if FAULT == "wrong":
        out = out.at[0, -1, 0].multiply(3)
    if FAULT in ("hang", "dies", "races"):
        out = out * (1 + jax.pure_callback(effect, jax.ShapeDtypeStruct((), np.float32))).astype(
            out.dtype
        )
    return out, lse


def check(facts, say):
    if FAULT == "no memory":
        raise RuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes"
        )
    if FAULT == "slow start":
        if "pid" in facts:
            Path(facts["pid"]).write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)
    return self_test.faults(facts, say, partial(planted, q_chunk=64, kv_chunk=64))


child.main(sys.argv[2], check)
