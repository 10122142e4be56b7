"""The GPU suite's peers in PyTorch, in a process of their own: python benchmarks/torch_peers.py
TASK '{"key": value, ...}'

attention: SDPA's flash and cuDNN backends; for windows and packed documents varlen_attn and
FlexAttention. train: torch.compile and SDPA on twins of our models. Needs torch and numpy, but no
JAX. Results are printed as in gpu_worker.py.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_lock import compiling, measuring
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_models import Decoder
from worker import Times, emit, reported, rounds, serve, serve_turns

Row = dict[str, Any]
RESTART = 75
"""As in gpu_lab.py."""
NOT_SHOWN = ("fields", "n_params", "flops_per_token", "peak_flops", "flops", "window", "lengths")
"""Returns the lengths of the documents of a variant."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}


def wait(_: Any = None) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def probe() -> None:
    emit(
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        cudnn=torch.backends.cudnn.version(),
    )


def emit_each(variants: list[Row], measure: Callable[[Row], Row]) -> None:
    """Emits a row for each variant; an exception becomes its "unserved"."""
    for variant in variants:
        shown = {name: value for name, value in variant.items() if name not in NOT_SHOWN}
        try:
            emit(**shown, **measure(variant))
        except Exception as error:
            emit(**shown, unserved=f"{type(error).__name__}: {error}"[:600])
            try:
                wait()
            except Exception:
                sys.stdout.flush()
                os._exit(RESTART)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


# Attention alone.


def attention(variants: list[Row], dry_run: bool) -> None:
    """Times each variant, which is a shape and a peer, with "flops" of the forward and, if packed,
    "lengths" of each row's documents."""
    emit_each(variants, partial(_attention, dry_run=dry_run))


def _attention(variant: Row, dry_run: bool) -> Row:
    B, S, N, K, H = (variant[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim"))
    sizes = [(B, n, S, H) for n in (N, K, K, N)]
    with compiling():
        generator = torch.Generator(DEVICE).manual_seed(S + H)
        q, k, v, dout = (
            torch.randn(size, generator=generator, device=DEVICE).to(torch.bfloat16)
            for size in sizes
        )
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        forward, dout = _forward(variant, q, k, v, dout)
        out = forward()
        grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        wait()

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    with measuring():
        with torch.no_grad():
            times = rounds({"fwd": forward}, 1 if dry_run else 0, wait)
        times |= rounds({"bwd": backward}, 1 if dry_run else 0, wait)
    columns: Row = {}
    for way, flops in (("fwd", variant["flops"]), ("bwd", 2.5 * variant["flops"])):
        columns |= _rates(way, times[way], flops)
    return columns | {
        "out_norm": float(out.detach().float().norm()),
        "dq_norm": float(grads[0].float().norm()),
    }


def _rates(way: str, times: Times, flops: float) -> Row:
    return {
        f"{way}_ms": 1e3 * times.median,
        f"{way}_tflops": flops / times.median / 1e12,
        f"{way}_spread": times.spread,
    }


def _forward(variant: Row, q: Any, k: Any, v: Any, dout: Any) -> tuple[Callable[[], Any], Any]:
    """Returns a call without arguments, and dout in the layout of its result."""
    peer, mask, gqa = variant["peer"], variant["mask"], variant["heads"] != variant["kv_heads"]
    if peer in BACKENDS:

        def sdpa() -> Any:
            with sdpa_kernel(BACKENDS[peer]):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=mask == "causal", enable_gqa=gqa
                )

        return sdpa, dout
    lengths = variant.get("lengths") or [[variant["seq"]]] * variant["batch"]
    if peer == "torch varlen":
        return _varlen(lengths, variant.get("window"), q, k, v), dout.transpose(1, 2).flatten(0, 1)
    return _flex(lengths, variant.get("window"), q, k, v, gqa), dout


def _varlen(
    lengths: list[list[int]], window: int | None, q: Any, k: Any, v: Any
) -> Callable[[], Any]:
    from torch.nn.attention.varlen import varlen_attn

    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    each = [n for row in lengths for n in row]
    starts = torch.tensor(np.cumsum([0, *each]), dtype=torch.int32, device=DEVICE)
    # torch 2.10 had is_causal, later ones have window_size
    parameters, options = inspect.signature(varlen_attn).parameters, {}
    if "window_size" in parameters:
        options["window_size"] = (window - 1 if window else -1, 0)
    elif window:
        raise ValueError(f"varlen_attn of torch {torch.__version__} has no window")
    else:
        options["is_causal"] = True
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    return partial(varlen_attn, *flat, starts, starts, max(each), max(each), **options)


def _flex(
    lengths: list[list[int]], window: int | None, q: Any, k: Any, v: Any, gqa: bool
) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = torch.tensor(
        np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]), device=DEVICE
    )

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = (i >= j) & (ids[b, i] == ids[b, j])
        return near & (i - j < window) if window else near

    mask = create_block_mask(visible, q.shape[0], None, q.shape[2], q.shape[2], device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=gqa)


# A whole train step.


def train(variants: list[Row], steps: int, dry_run: bool) -> None:
    """Times a train step: bf16 autocast, fp32 weights and moments, clipping, fused AdamW, like
    ours. A variant has "model", "fields" of its shape, "batch" in sequences, "flops_per_token"."""
    torch.backends.cuda.matmul.allow_tf32 = True
    emit_each(variants, partial(_train, steps=steps, dry_run=dry_run))


class Twin:
    """A train step of torch.compile on the twin of one of our models, on random tokens."""

    def __init__(self, variant: Row, dry_run: bool) -> None:
        fields = variant["fields"]
        self.losses: list[float] = []
        torch.manual_seed(0)
        with compiling():
            self.model = Decoder(fields).to(DEVICE)
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(),
                lr=1e-4,
                betas=(0.9, 0.95),
                weight_decay=0.1,
                fused=DEVICE == "cuda",
            )
            self.loss_of = torch.compile(self.model, backend="eager" if dry_run else "inductor")
            self.tokens = torch.randint(
                0, fields["vocab_size"], (4, variant["batch"], fields["seq_len"] + 1), device=DEVICE
            )
            start_time = time.perf_counter()
            self.step()
            self.compile_s = time.perf_counter() - start_time

    def step(self) -> float:
        """Makes a step. Returns its seconds."""
        start_time = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16), flash_attention():
            loss = self.loss_of(self.tokens[len(self.losses) % 4])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))
        wait()
        return time.perf_counter() - start_time


def flash_attention() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which scaled_dot_product_attention is FlashAttention on a GPU."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if DEVICE == "cuda" else contextlib.nullcontext()


def _train(variant: Row, steps: int, dry_run: bool) -> Row:
    twin = Twin(variant, dry_run)
    with measuring():
        for _ in range(3):
            twin.step()
        start_time = time.time()
        times = [twin.step() for _ in range(steps)]
        ended = time.time()
    seconds = statistics.median(times)
    rate = variant["batch"] * variant["fields"]["seq_len"] / seconds
    row = {
        "tokens_per_s": rate,
        "step_ms": 1e3 * seconds,
        "slowest_ms": 1e3 * max(times),
        **high_water(),
        "compile_s": twin.compile_s,
    }
    return row | {
        "loss_first": twin.losses[0],
        "loss_last": twin.losses[-1],
        "began": start_time,
        "ended": ended,
    }


def high_water() -> Row:
    """Returns the GiB that the process has had on the GPU at most."""
    return {"high_water_gib": torch.cuda.max_memory_allocated() / 2**30} if DEVICE == "cuda" else {}


def turns(variants: list[Row], seconds: float, dry_run: bool) -> None:
    """The train step of each variant, in turns with another process: see `worker.serve_turns`.
    Variants are those of `train`."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for variant in variants:
        shown = {name: value for name, value in variant.items() if name not in NOT_SHOWN}
        with reported(**shown):
            twin = Twin(variant, dry_run)
            serve_turns(
                shown,
                twin.step,
                seconds,
                {"compile_s": twin.compile_s, **high_water()},
                twin.losses,
            )


if __name__ == "__main__":
    serve({f.__name__: f for f in (probe, attention, train, turns)}, may=("torch",))
