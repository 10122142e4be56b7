"""The parts of gpu_suite.py about training. Each yields tables as soon as they are measured."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_attention import TORCH, note_of, torch_there, with_power
from gpu_lab import TINY, Lab, Table
from record import ROOT, Row

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
TIMED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2_124m": (32, {}),
    "gpt_1_3b": (8, {"remat": "none"}),
    "llama3_8b": (1, {"remat": "none", "n_layers": 8}),
}
"""Config -> sequences in a step, and changed fields, so that the step fits 78 GiB without rematerialisation (the lab plans at most 52)."""
ROOMY = 90
"""GiB that a process may take on a GPU on which two models fit beside each other: an H200's 139, of which JAX takes three quarters."""
TINY_TIMED = {"d_model": 64, "n_heads": 1, "n_kv_heads": 0, "d_ff": 0, "rope_theta": 1e4, "n_layers": 1, "remat": "none", "seq_len": 128}
"""Changes of TINY: a head dim of 64, which our kernel supports."""
NEEDED_BY_TRAIN = ("grain", "tyro", "tensorboardX", "tokenizers", "matplotlib")
AGREE = 5e-3
"""Largest relative difference of the first step's loss between implementations."""


def end_to_end(lab: Lab) -> Iterator[Table]:
    """Train steps in bf16 with fp32 weights and moments, no rematerialisation; gpt2_124m: 32 sequences of 1,024, gpt_1_3b: 8 of 2,048,
    llama3_8b with only 8 layers: 1 of 8,192. torch: torch.compile and SDPA, the same shapes. mfu: of the dense bf16 peak; joules: of the
    GPU alone. Medians."""
    names = ["mosaic", "xla"] if lab.dry_run else ["mosaic", "cudnn", "xla"]
    changes = {name: {"model": {**TINY, **TINY_TIMED} if lab.dry_run else fields} for name, (_, fields) in TIMED.items()}
    models = {name: one["model"] for name, one in changes.items()}
    shapes = {row["model"]: row for row in lab.run("shapes", platform="cpu", models=models, device_kind=lab.device["device_kind"])}
    rows: list[Row] = []
    # The largest models of the two frameworks run one after the other, because both do not fit together; so do all on a smaller GPU.
    roomy = lab.dry_run or lab.device.get("memory_limit_gib", 0) >= ROOMY
    for group, together in ((list(TIMED)[: 1 if lab.dry_run else 2], roomy), (list(TIMED)[2:], False)):
        ours = [variant(lab, changes[name], name, attention) for name in group for attention in names]
        ours.sort(key=lambda variant: variant["attention"] == "xla")
        twins = [shapes[name] | {"batch": batch_of(lab, name)} for name in group if name in shapes] if torch_there() else []
        how: dict[str, Any] = {"patience": 150, "needed": False, "steps": 1 if lab.dry_run else 15}
        here = {"directory": str(lab.directory), "changes": {}, "interpret": lab.dry_run, "cache": "tuned"}
        with ThreadPoolExecutor(2 if together else 1) as pool:
            first = pool.submit(
                lab.spread, "speed", ours, lanes=1, title="Train step", note=note_of(end_to_end), before=rows, **here, **how
            )
            second = pool.submit(lab.each, "train", twins, worker=TORCH, dry_run=lab.dry_run, **how)
        rows += [finished(lab, row, shapes) for row in first.result() + second.result()]
        yield "Train step", rows, note_of(end_to_end)
    lab.problems += [f"{name}: {problem}" for name, problem in disagreeing(rows)]


def variant(lab: Lab, changes: dict[str, Any], name: str, attention: str) -> Row:
    """Returns the arguments of the worker's task speed."""
    train = {"global_batch": batch_of(lab, name), "microbatches": 1, "steps": 1000}
    optimizer = {"warmup_steps": 2, "learning_rate": 1e-2 if lab.dry_run else 3e-4}
    return {"config": name, "attention": attention, "changes": {**changes, "train": train, "optimizer": optimizer}}


def batch_of(lab: Lab, name: str) -> int:
    return 8 if lab.dry_run else TIMED[name][0]


def finished(lab: Lab, row: Row, shapes: dict[str, Row]) -> Row:
    """Returns a row of either framework with the same columns: MFU, watts and joules per token."""
    name = row.get("config") or row["model"]
    shape, rate = shapes[name], row.get("tokens_per_s")
    first = {"model": name, "attention": row.get("attention", "torch")}
    kept = {key: value for key, value in row.items() if key not in ("config", "model", "attention")}
    kept = with_power(lab, [kept])[0]
    if rate:
        peak = shape["peak_flops"]
        kept["mfu"] = rate * shape["flops_per_token"] / peak if peak else None
        if "watts" in kept:
            kept["joules_per_token"] = kept["watts"] / rate
    return first | kept


def disagreeing(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Returns the models whose first loss differs between our implementations."""
    ours = [row for row in rows if row["attention"] != "torch" and "loss_first" in row]
    for name in dict.fromkeys(row["model"] for row in ours):
        first = {row["attention"]: row["loss_first"] for row in ours if row["model"] == name}
        for attention, loss in first.items():
            wanted = next(iter(first.values()))
            if not abs(loss - wanted) <= AGREE * abs(wanted):
                yield name, f"the first loss with {attention} is {loss:.5f}, with {next(iter(first))} {wanted:.5f}"


def training(lab: Lab) -> Iterator[Table]:
    """Runs gpt2_124m with train.py, kills it by SIGKILL after a checkpoint, and resumes it with the same command: repeated steps must have
    the same losses. joules: of the GPU alone, over the steps between checkpoint and end."""
    if missing := [name for name in NEEDED_BY_TRAIN if importlib.util.find_spec(name) is None]:
        lab.left_out.append(f"train.py needs {', '.join(missing)}, which are not installed; its parts are run instead")
        yield from resume(lab)
        return
    output, every = lab.directory / "train-py", 4 if lab.dry_run else 20
    steps, fields = 3 * every, lab.gpt2(8 if lab.dry_run else 32)["changes"]
    (prefix,) = [row["prefix"] for row in lab.run("prefix", platform="cpu", directory=str(lab.directory), changes=fields)]
    options = {f"{section}.{name}": value for section, values in fields.items() for name, value in values.items()}
    options |= {"train.steps": steps, "train.log_every": 1, "train.sample_tokens": 0, "train.eval_every": 0, "train.eval_sequences": 8}
    options |= {"checkpoint.every": every, "data.blend": prefix, "output": output, "launch.compile_cache": lab.directory / "train-cache"}
    options |= {"data.cache": lab.directory / "data-cache", "data.max_epochs": 0}
    command = [sys.executable, "train.py", "--config=configs/gpt2_124m.py"]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    saved = output / "checkpoints" / str(every)
    before, log = killed(lab, command, saved, output, every)
    if before is None:
        lab.note("train.py, to be killed, ended before or was too slow", log)
        return
    process, log = spawned(lab, command)
    marks: dict[int, float] = {}
    while process.poll() is None and lab.left() > 0:
        marks.setdefault(max(metrics(output), default=0), time.time())
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
    if process.wait():
        lab.note(f"train.py, resumed: exit status {process.returncode}", log)
        return
    drawn = lab.power.during(marks.get(every + 3, time.time()), marks.get(steps, time.time()))
    yield "train.py", [resumed(lab, before, metrics(output), every, log) | drawn_per_token(drawn, metrics(output))], note_of(training)


def killed(lab: Lab, command: list[str], saved: Path, output: Path, every: int) -> tuple[dict[int, Row] | None, Path]:
    """Returns the metrics and the log of a run killed by SIGKILL two steps after a checkpoint; None if it did not come that far."""
    process, log = spawned(lab, command)
    while process.poll() is None and lab.left() > 0 and not (saved.exists() and max(metrics(output), default=0) >= every + 2):
        time.sleep(0.05)
    status = process.poll()
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = metrics(output)
    return (found if status is None and saved.exists() and found else None), log


def spawned(lab: Lab, command: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts train.py. Returns (process, its log)."""
    log = lab.directory / f"{next(lab.n)}-train.py"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}".strip()
    platform = {"JAX_PLATFORMS": "cpu"} if lab.dry_run else {}
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "XLA_FLAGS": flags, **platform}), log


def metrics(output: Path) -> dict[int, Row]:
    """Returns step -> the row of metrics.jsonl that has its loss."""
    path = output / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return {row["step"]: row for row in map(json.loads, lines) if "loss" in row}


def resumed(lab: Lab, before: dict[int, Row], after: dict[int, Row], every: int, log: Path) -> Row:
    """Returns a row that compares the steps that both runs did."""
    twice = [step for step in before if step > every and step in after]
    differ = [step for step in twice if before[step]["loss"] != after[step]["loss"]]
    said_so = f"resumed at step {every}" in log.read_text()
    losses = [after[step]["loss"] for step in (min(after), max(after))]
    if not twice or differ or not said_so or not losses[1] < losses[0]:
        lab.problems.append(f"train.py: steps made twice {twice}, losses differ at {differ}, resumed {said_so}, losses {losses}")
    row: Row = {"resumed_at": every, "steps_made_twice": len(twice), "losses_that_differ": len(differ), "loss_first": losses[0]}
    return row | {"loss_last": losses[1], "xla_flags": DETERMINISTIC}


def drawn_per_token(drawn: Row, after: dict[int, Row]) -> Row:
    """Returns tokens_per_s, the median over the steps, and the GPU's power during them."""
    rates = sorted(row["tokens_per_s"] for row in after.values() if "tokens_per_s" in row)
    if not rates:
        return drawn
    rate = rates[len(rates) // 2]
    return {"tokens_per_s": rate, **drawn, **({"joules_per_token": drawn["watts"] / rate} if drawn else {})}


# Optional parts, if there is more time: python benchmarks/gpu_suite.py --parts losses,resume,rerun,layouts


def losses(lab: Lab) -> Iterator[Table]:
    """The first steps of a two-layer GPT with heads of 64."""
    run = lab.gpt2(8)
    if not lab.dry_run:
        run["changes"]["model"] = {**TINY, "d_model": 128, "seq_len": 256, "vocab_size": 512, "loss_chunk": 1024}
    exact = {"dtype": "float32", "attention": "xla", "precision": "highest"}
    bf16 = [{"dtype": "bfloat16", "attention": name, "precision": "default"} for name in lab.implementations]
    steps = 3 if lab.dry_run else 6
    wanted = lab.run("losses", **run, platform="cpu", variants=[exact], steps=steps)
    found = lab.run("losses", **run, variants=[exact, exact | {"precision": "default"}, *bf16], steps=steps)
    runs = {f"{where} {row['dtype']} {row['attention']} {row['precision']}": row
            for where, rows in (("cpu", wanted), ("device", found)) for row in rows if "losses" in row}  # fmt: skip
    rows = [{"step": i + 1, **{name: row["losses"][i] for name, row in runs.items()}} for i in range(steps)]
    yield "Losses of the first steps", rows, losses.__doc__ or ""
    cpu, gpu = "cpu float32 xla highest", "device float32 xla highest"
    pairs = [(gpu, cpu, 2e-5), ("device float32 xla default", cpu, 1e-3)]
    pairs += [(f"device bfloat16 {name} default", cpu, 1e-2) for name in lab.implementations]
    pairs += [(f"device bfloat16 {name} default", "device bfloat16 xla default", 5e-3) for name in lab.implementations if name != "xla"]
    rows = [agreement(one, runs[one], other, runs[other], tolerance) for one, other, tolerance in pairs if {one, other} <= runs.keys()]
    lab.problems += [f"{row['run']}: loss {row['loss_rel']:.1e} from {row['against']}" for row in rows if not row["holds"]]
    yield "Agreement", rows, "Largest relative difference over the steps. highest: fp32 matmuls in fp32; default: in TF32 on a GPU."


def agreement(one: str, a: Row, other: str, b: Row, tolerance: float) -> Row:
    """Returns a row with the differences between two runs of `losses`; `tolerance`: the largest allowed one."""
    loss, norm = (max(abs(x - y) / abs(y) for x, y in zip(a[key], b[key], strict=True)) for key in ("losses", "grad_norms"))
    return {"run": one, "against": other, "loss_rel": loss, "tolerance": tolerance, "holds": loss <= tolerance, "grad_norm_rel": norm}


def rerun(lab: Lab) -> Iterator[Table]:
    """Counts leaves of the state (weights, optimizer) that differ in any bit between two runs of the same steps from the same seed."""
    rows: list[Row] = []
    for name in ["auto"] if lab.dry_run else ["auto", "xla"]:
        for flags in (DETERMINISTIC, ""):
            if rows and lab.left() < 45 and not lab.dry_run:
                break  # the first row matters most; the others are taken while there is time
            run = lab.gpt2(8, layers=4)
            run["changes"]["model"] = run["changes"]["model"] | {"attention": name}
            found = [lab.run("rerun", flags=flags, **run, steps=3 if lab.dry_run else 8) for _ in range(2)]
            if [len(pair) for pair in found] == [2, 2]:
                (a, b), (c, _) = ([row["digests"] for row in pair] for pair in found)
                same, new = ([leaf for leaf in a if a[leaf] != other[leaf]] for other in (b, c))
                rows.append({"attention": name, "xla_flags": flags or "(none)", "leaves": len(a), "differ_same_program": len(same),
                             "differ_new_process": len(new), "for_example": next(iter(same + new), "")})  # fmt: skip
                if flags and same:
                    lab.problems.append(f"attention={name} with {flags}: two runs of one program differ in {len(same)} of {len(a)} leaves")
    yield "Bitwise reruns", rows, f"{rerun.__doc__} A new process compiles, and picks its matmul kernels, again."


def resume(lab: Lab) -> Iterator[Table]:
    """Compares eight uninterrupted steps with four, kill -9 in the fifth or later, and a new process that resumes from the checkpoint."""
    half, shared = 4, {**lab.gpt2(8, layers=4), "save_at": 4}
    same = {"flags": DETERMINISTIC, "cache": "resume"}

    def at(name: str) -> dict[str, Any]:
        (directory := lab.directory / name).mkdir(exist_ok=True)
        return {**shared, "directory": str(directory)}

    straight = lab.run("train", **same, **at("straight"), steps=2 * half)
    process, _, err = lab.start("train", **same, **at("killed"), steps=10**9)  # runs until it is killed
    saved = lab.directory / "killed" / "run" / "checkpoints" / str(half)
    while process.poll() is None and lab.left() > 0 and not saved.exists():
        time.sleep(0.05)
    status = process.poll()
    process.kill()
    process.wait()
    if status is not None or not saved.exists():
        lab.note("the run to be killed ended before, or was too slow", err)
        return
    resumed = lab.run("train", **same, **at("killed"), steps=2 * half)
    if straight and resumed:
        a, b = straight[0]["digests"], resumed[0]["digests"]
        different = [leaf for leaf in a if a[leaf] != b.get(leaf)]
        row = {"resumed_at": resumed[0]["resumed_at"], "leaves": len(a), "differ": len(different), "for_example": next(iter(different), "")}
        if different or row["resumed_at"] != half:
            lab.problems.append(f"resumed at step {row['resumed_at']} (saved at {half}); {len(different)} of {len(a)} leaves differ")
        yield "Kill -9 and resume", [{**row, "xla_flags": DETERMINISTIC}], f"{resume.__doc__} One compilation cache for all."


def layouts(lab: Lab) -> Iterator[Table]:
    """GPT-2 124M in bf16, 32 sequences of 1,024 tokens per step, attention=auto; from the smallest planned memory to the largest."""
    variants = [{"unroll": False}, {"remat": "full"}, {"remat": "save_names"}, {"microbatches": 4}, {"microbatches": 2}, {}]
    variants = [*variants[:2], *variants[4:]] if lab.dry_run else variants
    variants = [{"microbatches": 1, "remat": "none", "unroll": True, "attention": "auto"} | variant for variant in variants]
    rows = lab.run("speed", cache="tuned", **lab.gpt2(32), variants=variants, steps=2 if lab.dry_run else 10)
    rows = [{key: value for key, value in row.items() if key not in ("trace_s", "compile_s")} for row in with_power(lab, rows)]  # not cold
    yield "Microbatches and rematerialisation", rows, f"{layouts.__doc__} high_water: of the process so far; a row's own where it grew."
