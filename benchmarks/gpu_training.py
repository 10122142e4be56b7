"""The parts of gpu_suite.py about training. Each yields tables as soon as they are measured."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from forked import Forked, script
from gpu_attention import TORCH, note_of, torch_there
from gpu_lab import FAST_COMPILES, TINY, Lab, Table
from record import ROOT, Row

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
TIMED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2_124m": (32, {}),
    "gpt_1_3b": (8, {"remat": "none"}),
    "llama3_8b": (1, {"remat": "none", "n_layers": 8}),
}
"""Config -> sequences in a step, and changed fields, so that the step fits 78 GiB without
rematerialisation (the lab plans at most 52)."""
ROOMY = 90
"""GiB that a process may take on a GPU on which two models fit beside each other: an H200's 139, of
which JAX takes three quarters."""
TINY_TIMED = {
    "d_model": 64,
    "n_heads": 1,
    "n_kv_heads": 0,
    "d_ff": 0,
    "rope_theta": 1e4,
    "n_layers": 1,
    "remat": "none",
    "seq_len": 128,
}
"""Changes of TINY: a head dim of 64, which our kernel supports."""
NEEDED_BY_TRAIN = ("grain", "tyro", "tensorboardX", "tokenizers", "matplotlib")
AGREE = 5e-3
"""Largest relative difference of the first step's loss between implementations."""


def end_to_end(lab: Lab) -> Iterator[Table]:
    """Train steps in bf16 with fp32 weights and moments, no rematerialisation; gpt2_124m: 32
    sequences of 1,024, gpt_1_3b: 8 of 2,048, llama3_8b with only 8 layers: 1 of 8,192. torch:
    torch.compile and SDPA, the same shapes. mfu: of the dense bf16 peak; joules: of the GPU alone.
    Medians."""
    names = ["mosaic", "xla"] if lab.dry_run else ["mosaic", "cudnn", "xla"]
    changes = {
        name: {"model": {**TINY, **TINY_TIMED} if lab.dry_run else fields}
        for name, (_, fields) in TIMED.items()
    }
    models = {name: one["model"] for name, one in changes.items()}
    shapes = {
        row["model"]: row
        for row in lab.run(
            "shapes", platform="cpu", models=models, device_kind=lab.device["device_kind"]
        )
    }
    rows: list[Row] = []
    # The largest models of the two frameworks run one after the other, because both do not fit
    # together; so do all on a smaller GPU.
    roomy = lab.dry_run or lab.device.get("memory_limit_gib", 0) >= ROOMY
    for group, together in (
        (list(TIMED)[: 1 if lab.dry_run else 2], roomy),
        (list(TIMED)[2:], False),
    ):
        ours = [
            variant(lab, changes[name], name, attention) for name in group for attention in names
        ]
        ours.sort(key=lambda variant: variant["attention"] == "xla")
        twins = (
            [shapes[name] | {"batch": batch_of(lab, name)} for name in group if name in shapes]
            if torch_there()
            else []
        )
        options: dict[str, Any] = {
            "patience": 150,
            "needed": False,
            "steps": 1 if lab.dry_run else 15,
        }
        context = {
            "directory": str(lab.directory),
            "changes": {},
            "interpret": lab.dry_run,
            "cache": "tuned",
        }
        with ThreadPoolExecutor(2 if together else 1) as pool:
            first = pool.submit(
                lab.spread,
                "speed",
                ours,
                lanes=1,
                title="Train step",
                note=note_of(end_to_end),
                earlier_rows=rows,
                **context,
                **options,
            )
            second = pool.submit(
                lab.each, "train", twins, worker=TORCH, dry_run=lab.dry_run, **options
            )
        rows += [finished(lab, row, shapes) for row in first.result() + second.result()]
        yield "Train step", rows, note_of(end_to_end)
    lab.problems += [f"{name}: {problem}" for name, problem in disagreeing(rows)]


def variant(lab: Lab, changes: dict[str, Any], name: str, attention: str) -> Row:
    """Returns the arguments of the worker's task speed."""
    train = {"global_batch": batch_of(lab, name), "microbatches": 1, "steps": 1000}
    optimizer = {"warmup_steps": 2, "learning_rate": 1e-2 if lab.dry_run else 3e-4}
    return {
        "config": name,
        "attention": attention,
        "changes": {**changes, "train": train, "optimizer": optimizer},
    }


def batch_of(lab: Lab, name: str) -> int:
    return 8 if lab.dry_run else TIMED[name][0]


def finished(lab: Lab, row: Row, shapes: dict[str, Row]) -> Row:
    """Returns a row of either framework with the same columns: MFU, watts and joules per token."""
    name = row.get("config") or row["model"]
    shape, rate = shapes[name], row.get("tokens_per_s")
    first = {"model": name, "attention": row.get("attention", "torch")}
    columns = {
        key: value for key, value in row.items() if key not in ("config", "model", "attention")
    }
    if rate:
        peak = shape["peak_flops"]
        columns["mfu"] = rate * shape["flops_per_token"] / peak if peak else None
        if "watts" in columns:
            columns["joules_per_token"] = columns["watts"] / rate
    return first | columns


def disagreeing(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Returns the models whose first loss differs between our implementations."""
    ours = [row for row in rows if row["attention"] != "torch" and "loss_first" in row]
    for name in dict.fromkeys(row["model"] for row in ours):
        first = {row["attention"]: row["loss_first"] for row in ours if row["model"] == name}
        for attention, loss in first.items():
            expected = next(iter(first.values()))
            if not abs(loss - expected) <= AGREE * abs(expected):
                yield (
                    name,
                    (
                        f"the first loss with {attention} is {loss:.5f}, with {next(iter(first))} "
                        f"{expected:.5f}"
                    ),
                )


def training(lab: Lab) -> Iterator[Table]:
    """train.py on gpt2_124m and the source of Python's standard library: trains for a minute,
    saves, is killed by SIGKILL, and resumes by the same command. The newest checkpoint was set
    aside, so that it resumes from the one before. The steps that are made twice must have the same
    losses, and the checkpoint that is written twice the same bits in every array. SIGTERM then ends
    the run (status 99), and generate.py continues a prompt. joules: of the GPU alone."""
    if missing := [name for name in NEEDED_BY_TRAIN if importlib.util.find_spec(name) is None]:
        lab.left_out.append(
            f"train.py needs {', '.join(missing)}, which are not installed; its parts are run "
            "instead, on synthetic text"
        )
        yield from resume(lab)
        return
    yield from TrainRun(lab).tables()


class TrainRun:
    """A run of train.py: killed, resumed and used."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.output = lab, lab.directory / "train-py"
        self.every = 2 if lab.dry_run else 100
        self.seconds = 0.0 if lab.dry_run else max(10.0, min(60.0, lab.left() - 110))
        """For which it trains before it is killed."""
        self.row: Row = {"config": "gpt2_124m", "xla_flags": DETERMINISTIC}

    def command(self) -> list[str]:
        """Returns the command that starts the run, and resumes it."""
        text = "stdlib"
        if self.lab.dry_run:  # a small part of the same
            path = self.lab.directory / "text.txt"
            path.write_text(
                Path(json.__file__).read_text(encoding="utf-8")
                + Path(subprocess.__file__).read_text(encoding="utf-8"),
                encoding="utf-8",
            )
            text = str(path)
        options = {
            f"{section}.{name}": value
            for section, values in self.fields().items()
            for name, value in values.items()
        }
        options |= {
            "train.log_every": 1,
            "train.sample_tokens": 0,
            "train.eval_every": 0,
            "checkpoint.every": self.every,
        }
        # the checkpoint that is written twice is still there after the save on SIGTERM
        options["checkpoint.keep"] = 100
        options |= {
            "data.path": text,
            "data.cache": self.lab.directory / "data-cache",
            "data.max_epochs": 0,
            "output": self.output,
        }
        options["launch.compile_cache"] = self.lab.directory / "train-cache"
        return [
            "train.py",
            "--config=configs/gpt2_124m.py",
            *(f"--config.{name}={x}" for name, x in options.items()),
        ]

    def fields(self) -> dict[str, Row]:
        """Returns the changed fields of the config: it runs for a minute on one GPU, or for seconds
        on a CPU."""
        if self.lab.dry_run:
            changes = self.lab.gpt2(8)["changes"]
            return {
                **changes,
                "model": {**TINY, "vocab_size": 320, "n_layers": 1},
                "data": {"tokenizer_vocab": 320},
            }
        train = {"global_batch": 64, "microbatches": 1, "steps": 2000}
        return {
            "train": train,
            "optimizer": {"warmup_steps": 50},
            "data": {"tokenizer_vocab": 4096},
        }

    def tables(self) -> Iterator[Table]:
        """Yields the table, whose row grows."""
        for stage in (self.train_and_kill, self.resume, self.compare, self.generate):
            problem = stage()
            if problem:
                self.lab.problems.append(f"train.py: {problem}")
                self.row["error"] = problem
            yield "train.py", [self.row], note_of(training)
            if problem:
                return

    def train_and_kill(self) -> str:
        """Starts the run and kills it. Returns the problem, if any."""
        process, log = spawned(self.lab, self.command())
        start_time = time.time()
        first = 0.0
        while process.poll() is None and self.lab.left() > 0:
            first = first or (time.time() if metrics(self.output) else 0.0)
            if first and time.time() - first >= self.seconds and self._is_past_two_checkpoints():
                break
            time.sleep(0.05)
        ended = time.time()
        status = process.poll()
        process.kill()
        process.wait()
        if status is not None:
            return f"exit status {status}: {last_line(log)}"
        self.first_metrics = metrics(self.output)
        saved = steps_saved(self.output)
        if len(saved) < 2:
            return f"too slow: {len(self.first_metrics)} steps, checkpoints {saved}"
        self.resumed_at, self.twice = saved[-2:]
        aside = self.lab.directory / "set-aside"
        aside.mkdir()
        (self.output / "checkpoints" / str(self.twice)).rename(aside / str(self.twice))
        losses = [
            self.first_metrics[step]["loss"]
            for step in (min(self.first_metrics), max(self.first_metrics))
        ]
        self.row |= {
            "first_step_s": first - start_time,
            "trained_s": ended - first,
            "steps": len(self.first_metrics),
            "loss_first": losses[0],
        }
        self.row |= {
            "loss_last": losses[1],
            **drawn_per_token(self.lab.power.during(first, ended), self.first_metrics),
        }
        return "" if losses[1] < losses[0] else f"the loss does not fall: {losses}"

    def _is_past_two_checkpoints(self) -> bool:
        saved = steps_saved(self.output)
        return len(saved) >= 2 and max(metrics(self.output), default=0) >= saved[-1] + 1

    def resume(self) -> str:
        """Resumes the run, and ends it by SIGTERM when it has written the checkpoint that was set
        aside. Returns the problem, if any."""
        start_time = time.time()
        process, log = spawned(self.lab, self.command())
        while (
            process.poll() is None
            and self.lab.left() > 0
            and self.twice not in steps_saved(self.output)
        ):
            time.sleep(0.05)
        written_s = time.time() - start_time
        status = process.poll()
        process.send_signal(signal.SIGTERM)
        try:
            ended = process.wait(max(1.0, self.lab.left()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "SIGTERM did not end it"
        if status is not None or self.twice not in steps_saved(self.output):
            return f"resumed: exit status {status}: {last_line(log)}"
        resumed_metrics = metrics(self.output)
        repeated = [
            step
            for step in self.first_metrics
            if step > self.resumed_at and step in resumed_metrics
        ]
        differ = [
            step
            for step in repeated
            if self.first_metrics[step]["loss"] != resumed_metrics[step]["loss"]
        ]
        self.row |= {
            "resumed_at": self.resumed_at,
            "written_again_s": written_s,
            "steps_made_twice": len(repeated),
        }
        self.row |= {"losses_that_differ": len(differ), "status_of_sigterm": ended}
        if f"resumed at step {self.resumed_at}" not in log.read_text(encoding="utf-8"):
            return f"it did not resume at step {self.resumed_at}"
        if ended != SAVED_ON_SIGTERM:
            return f"SIGTERM ended it with status {ended}: {last_line(log)}"
        return f"losses differ at steps {differ}" if differ or not repeated else ""

    def compare(self) -> str:
        """Compares the checkpoint that was written twice. Returns the problem, if any."""
        pair = [
            str(path / str(self.twice))
            for path in (self.lab.directory / "set-aside", self.output / "checkpoints")
        ]
        status, text = self._run("-m", "mesh_lm.checkpoint", "diff", *pair)
        differing = re.search(r"(\d+) arrays differ", text)
        self.row |= {
            "compared_step": self.twice,
            "arrays_that_differ": int(differing[1]) if differing else None if status else 0,
        }
        return (
            f"step {self.twice} was written twice, and differs: {' '.join(text.split())[-200:]}"
            if status
            else ""
        )

    def generate(self) -> str:
        """Continues a prompt. Returns the problem, if any."""
        start_time = time.time()
        status, text = self._run(
            "-m",
            "mesh_lm.generate",
            f"--checkpoint={self.output}",
            f"--prompt={PROMPT}",
            "--tokens=16",
        )
        generated = " ".join(text[text.find(PROMPT) :].split())
        self.row |= {"generate_s": time.time() - start_time, "generated": generated[:100]}
        return (
            f"generate.py: exit status {status}: {generated[-200:]}"
            if status or len(generated) <= len(PROMPT)
            else ""
        )

    def _run(self, *words: str) -> tuple[int | None, str]:
        """Runs Python with these words. Returns the exit status, None if there was no time left,
        and the output."""
        process, log = spawned(self.lab, [*words])
        try:
            status: int | None = process.wait(max(1.0, self.lab.left()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        return status, log.read_text(errors="replace", encoding="utf-8")


PROMPT = "def read("
SAVED_ON_SIGTERM = 99
"""The exit status of a run that SIGTERM has ended after a save."""


def train_environment(lab: Lab) -> dict[str, str]:
    """Returns the environment of train.py: with deterministic operations, and on a CPU with fast
    compilations in a dry run."""
    dry = {"JAX_PLATFORMS": "cpu"} if lab.dry_run else {}
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILES if lab.dry_run else ''} {DETERMINISTIC}"
    ).strip()
    return {**os.environ, "XLA_FLAGS": flags, **dry}


def spawned(lab: Lab, command: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts Python with these words in the root of the repository. Returns (process, its log)."""
    log = lab.directory / f"{next(lab.n)}-train.py"
    environment = train_environment(lab)
    with log.open("w", encoding="utf-8") as out:
        if lab.forks:
            run = partial(script, *command)
            return Forked(
                run, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            ), log  # type: ignore[return-value]
        command = [sys.executable, *command]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT, env=environment
        ), log


def last_line(log: Path) -> str:
    """Returns the last line of a process's output."""
    lines = log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
    return lines[-1][:300] if lines else "no message"


def steps_saved(output: Path) -> list[int]:
    """Returns the steps that have a complete checkpoint, in order."""
    return sorted(int(path.name) for path in output.glob("checkpoints/*") if path.name.isdecimal())


def metrics(output: Path) -> dict[int, Row]:
    """Returns step -> the row of metrics.jsonl that has its loss."""
    path = output / "metrics.jsonl"
    lines = (
        path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if path.exists() else []
    )
    return {row["step"]: row for row in map(json.loads, lines) if "loss" in row}


def drawn_per_token(drawn: Row, rows: dict[int, Row]) -> Row:
    """Returns tokens_per_s, the median over the steps, and the GPU's power during them."""
    rates = [row["tokens_per_s"] for row in rows.values() if "tokens_per_s" in row]
    if not rates:
        return drawn
    rate = statistics.median(rates)
    return {
        "tokens_per_s": rate,
        **drawn,
        **({"joules_per_token": drawn["watts"] / rate} if drawn else {}),
    }


# Optional parts, if there is more time: python benchmarks/gpu_suite.py --parts
# losses,resume,rerun,layouts


def losses(lab: Lab) -> Iterator[Table]:
    """The first steps of a two-layer GPT with heads of 64."""
    run = lab.gpt2(8)
    if not lab.dry_run:
        run["changes"]["model"] = {
            **TINY,
            "d_model": 128,
            "seq_len": 256,
            "vocab_size": 512,
            "loss_chunk": 1024,
        }
    exact = {"dtype": "float32", "attention": "xla", "precision": "highest"}
    bf16 = [
        {"dtype": "bfloat16", "attention": name, "precision": "default"}
        for name in lab.implementations
    ]
    steps = 3 if lab.dry_run else 6
    exact_rows = lab.run("losses", **run, platform="cpu", variants=[exact], steps=steps)
    device_rows = lab.run(
        "losses", **run, variants=[exact, exact | {"precision": "default"}, *bf16], steps=steps
    )
    runs = {f"{platform} {row['dtype']} {row['attention']} {row['precision']}": row
            for platform, rows in (("cpu", exact_rows), ("device", device_rows))
            for row in rows if "losses" in row}  # fmt: skip
    rows = [
        {"step": i + 1, **{name: row["losses"][i] for name, row in runs.items()}}
        for i in range(steps)
    ]
    yield "Losses of the first steps", rows, losses.__doc__ or ""
    cpu, gpu = "cpu float32 xla highest", "device float32 xla highest"
    pairs = [(gpu, cpu, 2e-5), ("device float32 xla default", cpu, 1e-3)]
    pairs += [(f"device bfloat16 {name} default", cpu, 1e-2) for name in lab.implementations]
    pairs += [
        (f"device bfloat16 {name} default", "device bfloat16 xla default", 5e-3)
        for name in lab.implementations
        if name != "xla"
    ]
    rows = [
        agreement(one, runs[one], other, runs[other], tolerance)
        for one, other, tolerance in pairs
        if {one, other} <= runs.keys()
    ]
    lab.problems += [
        f"{row['run']}: loss {row['loss_rel']:.1e} from {row['against']}"
        for row in rows
        if not row["holds"]
    ]
    yield (
        "Agreement",
        rows,
        (
            "Largest relative difference over the steps. highest: fp32 matmuls in fp32; default: "
            "in TF32 on a GPU."
        ),
    )


def agreement(one: str, a: Row, other: str, b: Row, tolerance: float) -> Row:
    """Returns a row with the differences between two runs of `losses`; `tolerance`: the largest
    allowed one."""
    loss, norm = (
        max(abs(x - y) / abs(y) for x, y in zip(a[key], b[key], strict=True))
        for key in ("losses", "grad_norms")
    )
    return {
        "run": one,
        "against": other,
        "loss_rel": loss,
        "tolerance": tolerance,
        "holds": loss <= tolerance,
        "grad_norm_rel": norm,
    }


def rerun(lab: Lab) -> Iterator[Table]:
    """Counts leaves of the state (weights, optimizer) that differ in any bit between two runs of
    the same steps from the same seed."""
    rows: list[Row] = []
    for name in ["auto"] if lab.dry_run else ["auto", "xla"]:
        for flags in (DETERMINISTIC, ""):
            if rows and lab.left() < 45 and not lab.dry_run:
                break  # the first row matters most; the others are taken while there is time
            run = lab.gpt2(8, layers=4)
            run["changes"]["model"] = run["changes"]["model"] | {"attention": name}
            pairs = [
                lab.run("rerun", flags=flags, **run, steps=3 if lab.dry_run else 8)
                for _ in range(2)
            ]
            if [len(pair) for pair in pairs] == [2, 2]:
                (a, b), (c, _) = ([row["digests"] for row in pair] for pair in pairs)
                same, new = ([leaf for leaf in a if a[leaf] != other[leaf]] for other in (b, c))
                rows.append({"attention": name, "xla_flags": flags or "(none)", "leaves": len(a), "differ_same_program": len(same),
                             "differ_new_process": len(new), "for_example": next(iter(same + new), "")})  # fmt: skip
                if flags and same:
                    lab.problems.append(
                        f"attention={name} with {flags}: two runs of one program differ in "
                        f"{len(same)} of {len(a)} leaves"
                    )
    yield (
        "Bitwise reruns",
        rows,
        f"{rerun.__doc__} A new process compiles, and picks its matmul kernels, again.",
    )


def resume(lab: Lab) -> Iterator[Table]:
    """Compares eight uninterrupted steps with four, kill -9 in the fifth or later, and a new
    process that resumes from the checkpoint."""
    half, shared = 4, {**lab.gpt2(8, layers=4), "save_at": 4}
    same = {"flags": DETERMINISTIC, "cache": "resume"}

    def at(name: str) -> dict[str, Any]:
        (directory := lab.directory / name).mkdir(exist_ok=True)
        return {**shared, "directory": str(directory)}

    straight = lab.run("train", **same, **at("straight"), steps=2 * half)
    # runs until it is killed
    process, _, err = lab.start("train", **same, **at("killed"), steps=10**9)
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
        row = {
            "resumed_at": resumed[0]["resumed_at"],
            "leaves": len(a),
            "differ": len(different),
            "for_example": next(iter(different), ""),
        }
        if different or row["resumed_at"] != half:
            lab.problems.append(
                f"resumed at step {row['resumed_at']} (saved at {half}); {len(different)} of "
                f"{len(a)} leaves differ"
            )
        yield (
            "Kill -9 and resume",
            [{**row, "xla_flags": DETERMINISTIC}],
            f"{resume.__doc__} One compilation cache for all.",
        )


def layouts(lab: Lab) -> Iterator[Table]:
    """GPT-2 124M in bf16, 32 sequences of 1,024 tokens per step, attention=auto; from the smallest
    planned memory to the largest."""
    variants = [
        {"unroll": False},
        {"remat": "full"},
        {"remat": "save_names"},
        {"microbatches": 4},
        {"microbatches": 2},
        {},
    ]
    variants = [*variants[:2], *variants[4:]] if lab.dry_run else variants
    variants = [
        {"microbatches": 1, "remat": "none", "unroll": True, "attention": "auto"} | variant
        for variant in variants
    ]
    rows = lab.run(
        "speed", cache="tuned", **lab.gpt2(32), variants=variants, steps=2 if lab.dry_run else 10
    )
    # not cold
    rows = [
        {key: value for key, value in row.items() if key not in ("trace_s", "compile_s")}
        for row in rows
    ]
    yield (
        "Microbatches and rematerialisation",
        rows,
        f"{layouts.__doc__} high_water: of the process so far; a row's own where it grew.",
    )
