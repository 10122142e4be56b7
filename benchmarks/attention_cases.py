"""The attention calls of the GPU suite: the cases that are compared with the formula, and the
shapes that are timed. Random data.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim (Hv that
of v).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import Row

from pallas_kernels import BlockMask
from pallas_kernels.attention.cost import visible_pairs

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `flash_attention`, with its inputs and the weights of its loss."""

    name: str
    S: int = 1024
    T: int = 0
    """0: the same as S."""
    N: int = 8
    K: int = 0
    """0: the same as N."""
    H: int = 128
    Hv: int = 0
    """0: the same as H."""
    B: int = 2
    dtype: str = "bfloat16"
    documents: int = 0
    sinks: bool = False
    traced_offset: bool = False
    lse: bool = False
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    """causal, window, softcap, scale, q_offset as keywords."""
    mask: Callable[[int, int], BlockMask] | None = None
    """Makes the block mask from S and T."""

    @property
    def keys(self) -> int:
        return self.T or self.S

    def tiny(self) -> Case:
        """Returns a version for a CPU: a quarter as long, one sequence, two or four heads."""
        group = self.N // (self.K or self.N)
        heads = {"N": 2 * min(group, 2), "K": (1 if self.K == 1 else 2) if self.K else 0}
        quarter = {
            name: math.ceil(value / 4) if name in ("window", "q_offset") else value
            for name, value in self.static.items()
        }
        return dataclasses.replace(
            self, S=math.ceil(self.S / 4), T=math.ceil(self.T / 4), B=1, **heads, static=quarter
        )

    def features(self) -> dict[str, Any]:
        """Keywords that are not arrays."""
        features = dict(self.static)
        if self.traced_offset:
            del features["q_offset"]
        if self.mask:
            features["block_mask"] = self.mask(self.S, self.keys)
        return features

    def arrays(self) -> tuple[Arrays, Arrays, Arrays]:
        """Returns (arrays with gradients: q, k, v, perhaps sinks; the other arrays; weights of a
        loss: out, lse)."""
        random = np.random.default_rng([len(self.name), *self.name.encode()])
        K, Hv = self.K or self.N, self.Hv or self.H

        def normal(*shape: int, dtype: str = self.dtype) -> jax.Array:
            return jnp.asarray(random.standard_normal(shape, np.float32), dtype)

        q, k = normal(self.B, self.S, self.N, self.H), normal(self.B, self.keys, K, self.H)
        moving = {"q": q, "k": k, "v": normal(self.B, self.keys, K, Hv)}
        if self.sinks:
            moving["sinks"] = normal(self.N, dtype="float32")
        still: Arrays = {}
        if self.traced_offset:
            still["q_offset"] = jnp.asarray(self.static["q_offset"], jnp.int32)
        if self.documents:
            still["segment_ids"] = jnp.asarray(document_ids(random, self.B, self.S, self.documents))
            if self.T:
                still["kv_segment_ids"] = jnp.asarray(
                    document_ids(random, self.B, self.T, self.documents)
                )
        weights = {
            "out": normal(self.B, self.S, self.N, Hv, dtype="float32"),
            "lse": normal(self.B, self.S, self.N, dtype="float32"),
        }
        return moving, still, weights


def document_ids(random: np.random.Generator, B: int, S: int, documents: int) -> np.ndarray:
    """Returns int32 [B, S]: the ids of `documents` consecutive documents of random lengths in each
    row."""
    cuts = np.stack(
        [
            np.isin(np.arange(S), 1 + random.choice(S - 1, documents - 1, replace=False))
            for _ in range(B)
        ]
    )
    return np.cumsum(cuts, 1, dtype=np.int32)


def _bigbird(S: int, T: int) -> BlockMask:
    return BlockMask.bigbird(S, T, causal=True, random_blocks=1, window_blocks=1)


def _strided(S: int, T: int) -> BlockMask:
    return BlockMask.strided(S, T, stride=2)


_FULL = {"causal": False}
CASES = {
    case.name: case
    for case in (
        Case("causal"),
        Case("full", static=_FULL),
        Case("segments", documents=5),
        Case("GQA 8:2", K=2),
        Case("window", static={"window": 200}),
        Case("head dim 64", H=64),
        Case("head dim 256", H=256),
        Case("return_lse", lse=True),
        Case("softcap", static={"softcap": 5.0}),
        Case("uneven causal", S=1000),
        Case("q_offset", S=512, T=1024, static={"q_offset": 512}),
        Case(
            "q_offset traced", S=512, T=1024, static={"q_offset": 300}, traced_offset=True, lse=True
        ),
        Case("sinks", sinks=True),
        Case("block mask, causal", S=2048, mask=_bigbird),
        Case("fp16", dtype="float16"),
        Case("head dim 96", H=96),
        Case("head dim 192, values 128", H=192, Hv=128),
        Case("MQA 8:1", K=1),
        Case("uneven full", S=1000, T=777, static=_FULL),
        Case("segments of S and T, full", S=512, T=1000, documents=4, static=_FULL),
        Case("block mask, full", S=2048, static=_FULL, mask=_strided),
        Case("scale", static={"scale": 0.3}),
        Case("fp16 full head dim 64", dtype="float16", H=64, static=_FULL),
        Case(
            "causal, more keys, first rows empty",
            S=1024,
            T=512,
            static={"q_offset": -256},
            lse=True,
        ),
        Case(
            "together",
            S=1500,
            K=2,
            documents=4,
            sinks=True,
            lse=True,
            static={"window": 500, "softcap": 20.0},
        ),
    )
}
"""Cases by name, the most important first."""


WINDOW, DOCUMENT = 1024, 4096
"""Tokens in a window, and the average tokens in a packed document."""


def timed_case(row: Row, dtype: str, tiny: bool = False) -> Case:
    """Returns a shape of gpu_attention.py as a case."""
    mask, S = row["mask"], row["seq"]
    document = 64 if tiny else DOCUMENT
    static = {
        "causal": mask != "full",
        **({"window": 96 if tiny else WINDOW} if mask == "window" else {}),
    }
    sizes = {
        "S": S,
        "N": row["heads"],
        "K": row["kv_heads"],
        "H": row["head_dim"],
        "B": row["batch"],
    }
    return Case(
        f"{mask} {S}",
        **sizes,
        dtype=dtype,
        documents=max(2, S // document) if mask == "packed" else 0,
        static=static,
    )


def forward_flops(case: Case, segment_ids: np.ndarray | None) -> float:
    """Returns the FLOPs of the forward's two matmuls over the unmasked pairs. The backward has five
    matmuls, so 2.5 times as many."""
    if segment_ids is None:
        static = {
            name: value for name, value in case.static.items() if name in ("causal", "window")
        }
        pairs = case.B * visible_pairs(case.S, case.keys, **static)
    else:  # causal documents
        lengths = np.concatenate([np.bincount(ids) for ids in segment_ids])
        pairs = float((lengths * (lengths + 1) / 2).sum())
    return 2 * case.N * pairs * (case.H + (case.Hv or case.H))
