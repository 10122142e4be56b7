"""Everything worth knowing from a rare hour on a GPU, in one command under 8 minutes: python benchmarks/gpu_smoke.py

Parts: speed and memory of a GPT-2 train step by attention implementation, losses against the CPU's, kill -9 and resume, attention alone,
bitwise reruns, microbatches and rematerialisation. Each runs in processes of its own with a time limit, so that none takes the others
with it, and the results are written after each. Needs jax, flax, optax, orbax-checkpoint and numpy. `--dry-run` goes the same way on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_lab import TINY, Lab, Part, Table, measure, probed
from record import Row, options

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


# The parts: each yields tables as soon as they are measured.


def speed(lab: Lab) -> Iterator[Table]:
    """GPT-2 124M in bf16, 32 sequences of 1,024 tokens a step, no rematerialisation."""
    variants = [{"attention": name} for name in lab.implementations]
    rows = lab.run("speed", cache="speed", **lab.gpt2(32), variants=variants, steps=3 if lab.dry_run else 20)
    yield "Train step by attention", rows, f"{speed.__doc__} Medians; high water: of the process so far; program: what the compiler plans."


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
    """How far apart two runs of `losses` are; `tolerance` is that of the losses."""
    loss, norm = (max(abs(x - y) / abs(y) for x, y in zip(a[key], b[key], strict=True)) for key in ("losses", "grad_norms"))
    return {"run": one, "against": other, "loss_rel": loss, "tolerance": tolerance, "holds": loss <= tolerance, "grad_norm_rel": norm}


def rerun(lab: Lab) -> Iterator[Table]:
    """Leaves of the state (parameters and both moments) that differ in some bit between two runs of the same steps from the same seed."""
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
    """Eight steps straight, against four, kill -9 in the fifth or later, and a new process that goes on from the checkpoint."""
    half, shared = 4, {**lab.gpt2(8, layers=4), "save_at": 4}
    same = {"flags": DETERMINISTIC, "cache": "resume"}

    def at(name: str) -> dict[str, Any]:
        (directory := lab.directory / name).mkdir(exist_ok=True)
        return {**shared, "directory": str(directory)}

    straight = lab.run("train", **same, **at("straight"), steps=2 * half)
    process, _, err = lab.start("train", **same, **at("killed"), steps=10**9)  # until it is killed
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
    """GPT-2 124M in bf16, 32 sequences of 1,024 tokens a step, attention=auto; from the smallest plan to the largest."""
    variants = [{"remat": "full"}, {"remat": "save_names"}, {"microbatches": 4}, {"microbatches": 2}, {}]
    variants = [variants[0], *variants[3:]] if lab.dry_run else variants
    variants = [{"microbatches": 1, "remat": "none", "attention": "auto"} | variant for variant in variants]
    rows = lab.run("speed", cache="tuned", **lab.gpt2(32), variants=variants, steps=2 if lab.dry_run else 10)
    rows = [{key: value for key, value in row.items() if key not in ("trace_s", "compile_s")} for row in rows]  # not cold
    yield "Microbatches and rematerialisation", rows, f"{layouts.__doc__} high_water: of the process so far; a row's own where it grew."


def kernels(lab: Lab) -> Iterator[Table]:
    """Causal attention alone in bf16: 16,384 tokens, heads x head dim = 2,048. FLOPs a head: 2 S^2 H forward, 3.5 times that in all."""
    shapes = [[32, 8], [64, 16]] if lab.dry_run else [[4096, 128], [1024, 64], [16384, 128], [4096, 64], [1024, 128], [16384, 64]]
    sizes: dict[str, Any] = {"tokens": 64, "width": 32, "repeats": 2} if lab.dry_run else {"tokens": 16384, "width": 2048, "repeats": 5}
    rows = lab.run("attention", shapes=shapes, implementations=lab.implementations, **sizes)
    yield "Attention alone", rows, f"{kernels.__doc__} rel_difference: of outputs and gradients, to the first implementation's."


PARTS = (Part(speed, 115), Part(losses, 60), Part(resume, 60), Part(kernels, 65), Part(rerun, 90), Part(layouts, 80))


def main() -> int:
    arguments = options(__doc__ or "", quick="--dry-run", quick_help="the same on a CPU, with tiny shapes, in seconds").parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as directory:
        lab = Lab(Path(directory), arguments.dry_run)
        began = time.monotonic()
        if isinstance(device := probed(lab, "--dry-run"), int):
            return device
        if not lab.dry_run:
            lab.implementations = sorted(device["implementations"], key=lambda name: ("xla", "cudnn", name).index(name))
        return measure(f"gpu_smoke{'-dry-run' * lab.dry_run}", PARTS, lab, device, arguments.output, began)


if __name__ == "__main__":
    sys.exit(main())
