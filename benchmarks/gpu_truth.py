"""The first benchmark to run on a machine with one H100: do our kernels run, and do the lab's
assumptions and predictions hold?

python benchmarks/gpu_truth.py ends in less than 10 minutes. Its cases, most important first:
`kernels` compares our attention, forward and backward, at the shape of gpt_1_3b, with the formula
in fp32; `cudnn` does the same with cuDNN's; `matmul` and `elementwise` measure which shares of the
data sheet's peaks a GPU sustains for seconds, and compare them with the lab's assumptions; `steps`
compares ten steps of gpt_1_3b, with one GPU's share of its batch, with the time and the memory that
the lab predicts for the same config and one device.

Each case runs in processes of its own with a time limit, and results are written after each row: a
kernel that hangs loses its own case only, and a run that is killed keeps its results. Needs jax and
numpy; `steps` also flax, optax and orbax-checkpoint; the prediction ptxas. Without a GPU it prints
that and exits with status 0. `--dry-run` does the same on a CPU, with tiny sizes and an interpreted
kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gpu_attention import OURS, WORKER, note_of, shape
from gpu_lab import TINY, Lab, Part, Table, compiler_there, suite
from gpu_training import TINY_TIMED
from record import Row

DEVICE = "device_worker.py"
HEADLINE = shape("causal", 128, 2048, tokens=8 * 2048)
"""The shape of gpt_1_3b's attention on each of eight GPUs: a microbatch of 8 sequences."""
TINY_HEADLINE = shape("causal", 64, 128, tokens=128, width=64)
MATMULS: tuple[Row, ...] = (
    {"config": "gpt_1_3b", "tokens": 16_384, "d_model": 2048, "width": [2048, 6144, 8192]},
    {"config": "llama3_8b", "tokens": 8192, "d_model": 4096, "width": [4096, 14_336]},
    {"config": "gpt_175b", "tokens": 8192, "d_model": 12_288, "width": [1536, 4608, 6144]},
)
"""A config's microbatch on one device: tokens, and the widths of attention and of the MLP (for
gpt_175b divided by tensor=8)."""
ELEMENTWISE = [
    {"dtype": dtype, "gib": gib} for dtype in ("bfloat16", "float32") for gib in (0.25, 1.0, 2.0)
]
"""Five times an H100's L2, and more."""
CONFIG, RULES = "gpt_1_3b", "fsdp"
SHARE = {"global_batch": 64, "microbatches": 8}
"""One GPU's eighth of 512 sequences, in as many microbatches as the config has."""
STEPS = 10
LAYERS = (24, 12)


def kernels(lab: Lab) -> Iterator[Table]:
    """Our attention at the shape of gpt_1_3b, bf16, random data. rel: |x - formula| / |formula|,
    the formula in fp32. bwd: the backward alone, 2.5 times the FLOPs."""
    yield from smoke(lab, "Our attention", OURS, note_of(kernels))
    lab.found["kernels"] = not lab.problems


def cudnn(lab: Lab) -> Iterator[Table]:
    """The same for cuDNN's attention."""
    yield from smoke(lab, "cuDNN's attention", "xla" if lab.dry_run else "cudnn", note_of(cudnn))


def smoke(lab: Lab, title: str, peer: str, note: str) -> Iterator[Table]:
    variants = [
        (TINY_HEADLINE if lab.dry_run else HEADLINE) | {"peer": peer, "way": way}
        for way in ("fwd", "bwd")
    ]
    options = {"patience": max(1.0, lab.left() / 2), "dry_run": lab.dry_run}
    rows = lab.spread("smoke", variants, lanes=1, title=title, note=note, worker=WORKER, **options)
    yield title, rows, note


def matmul(lab: Lab) -> Iterator[Table]:
    """bf16 matmuls of random data, back to back for seconds: all widths of a config in turn, then
    each alone, forward and weights' gradients. share_of_peak: of the data sheet's dense peak;
    lab_assumes: the lab's share. Medians of five samples."""
    alone = [row | {"width": width, "seconds": 1.0} for row in MATMULS for width in row["width"]]
    variants = [*(row | {"seconds": 4.0} for row in MATMULS), *alone]
    if lab.dry_run:
        variants = [
            MATMULS[0] | {"tokens": 64, "d_model": 32, "width": width, "seconds": 0.05}
            for width in ([64, 32], 64)
        ]
    yield from sustained(lab, "matmul", variants, note_of(matmul))


def elementwise(lab: Lab) -> Iterator[Table]:
    """y = a x + b: bytes read and written per second; gib is the size of one of the two arrays.
    Shares of the memory's bandwidth."""
    variants = [row | {"seconds": 1.0} for row in ELEMENTWISE]
    if lab.dry_run:
        variants = [row | {"gib": 2**-10, "seconds": 0.05} for row in ELEMENTWISE[::3]]
    yield from sustained(lab, "elementwise", variants, note_of(elementwise))


def sustained(lab: Lab, task: str, variants: list[Row], note: str) -> Iterator[Table]:
    title = task.capitalize()
    rows = lab.spread(
        task, variants, lanes=1, title=title, note=note, worker=DEVICE, patience=lab.left()
    )
    yield title, rows, note


def steps(lab: Lab) -> Iterator[Table]:
    """Ten train steps of gpt_1_3b, as shipped except for a warm-up of 2 steps; 64 sequences are
    one GPU's share of 512 on eight. predicted: by the lab, for one GPU of this kind, without
    using it. measured_peak: the allocator's; compiled_peak: of the program compiled here. ratio:
    measured / predicted. attention: cudnn if ours failed above. layers: fewer only if memory did
    not suffice."""
    title, rows = "Predicted and measured", []
    shipped = {"attention": "auto" if lab.found.get("kernels", True) else "cudnn"}
    for layers in LAYERS:
        model = (
            {**TINY, **TINY_TIMED, "remat": "save_names"}
            if lab.dry_run
            else shipped | {"n_layers": layers}
        )
        train = {"global_batch": 8, "microbatches": 2} if lab.dry_run else SHARE
        changes = {
            "model": model,
            "train": train,
            "optimizer": {"warmup_steps": 2},
            "launch": {"compile_cache": ""},
        }
        options = {
            "directory": str(lab.directory),
            "changes": changes,
            "name": CONFIG,
            "rules": RULES,
        }
        labels = {
            "config": CONFIG,
            "layers": model["n_layers"],
            "sequences": train["global_batch"],
            "microbatches": train["microbatches"],
        }
        labels |= {"attention": shipped["attention"]}
        if lab.dry_run and not compiler_there():
            lab.left_out.append("XLA's compiler for CUDA is not installed")
            plan = []
        else:
            plan = lab.run(
                "predicted", platform="cpu", hidden=True, target=target_of(lab), **options
            )
        rows.append(compared(lab, labels, plan, []))
        yield title, rows, note_of(steps)
        ran = lab.run("stepped", steps=1 if lab.dry_run else STEPS, **options)
        rows[-1] = compared(lab, labels, plan, ran)
        yield title, rows, note_of(steps)
        if not any("RESOURCE_EXHAUSTED" in row.get("error", "") for row in ran):
            return


def target_of(lab: Lab) -> str:
    """Returns the lab's name of the GPU."""
    return "h200" if "H200" in lab.device.get("device_kind", "") else "h100"


def compared(lab: Lab, labels: Row, plan: list[Row], ran: list[Row]) -> Row:
    """Returns a row with both; if one of them failed, with its error."""
    prediction, run = (next(iter(rows), {}) for rows in (plan, ran))
    row = labels | {
        name: prediction.get(name)
        for name in ("target", "predicted_step_s", "predicted_peak_gib", "fits")
    }
    measured = {
        "measured_step_s": run["step_ms"] / 1e3 if "step_ms" in run else None,
        "measured_peak_gib": run.get("high_water_gib"),
        "compiled_peak_gib": run.get("peak_gib"),
    }
    for figure in ("step_s", "peak_gib"):
        both = measured[f"measured_{figure}"], prediction.get(f"predicted_{figure}")
        measured[f"{figure.partition('_')[0]}_ratio"] = (
            both[0] / both[1] if both[0] and both[1] else None
        )
    columns = (
        "slowest_ms", "tokens_per_s", "mfu", "trace_s", "compile_s", "loss_first", "loss_last",
        "flags", "watts", "sm_mhz", "celsius",
        "host_load",
    )  # fmt: skip
    errors = {
        f"{figure}_error": rows["error"]
        for figure, rows in (("prediction", prediction), ("run", run))
        if "error" in rows
    }
    return row | measured | {name: run.get(name) for name in columns} | errors


PARTS = (
    Part(kernels, 90),
    Part(cudnn, 60),
    Part(matmul, 110),
    Part(elementwise, 40),
    Part(steps, 250),
)
"""550 s in all, the start included. Time that a case does not use is available to later ones."""
SLOW = 4

if __name__ == "__main__":
    sys.exit(suite("gpu_truth", __doc__ or "", PARTS, slow=SLOW))
