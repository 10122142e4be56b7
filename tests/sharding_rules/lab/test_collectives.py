"""The compiled step, held to what it must send on paper (docs/closed_forms.md), and to golden
ledgers of what it sends.

`MESH_LM_GOLDEN=write pytest tests/sharding_rules/lab/test_collectives.py` writes the ledgers in
golden/ anew, for the installed jax: read their diff, for it is what you have changed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from mesh_lm.config import PipelineConfig, TrainConfig, TrainLoop, load
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.terms import BYTES, Term, by_axes, total
from mesh_lm.planning.program import compile_config
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.diff import explain, ledger_text
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import lint
from sharding_rules.lab.report import SCALAR, Collective, Report
from tests.form_rows import GPT, LLAMA

COMPILE_BUDGET = 70
pytestmark = pytest.mark.deviceless


@dataclasses.dataclass(frozen=True)
class Program:
    """A step to compile. rows: sequences of one microbatch on one batch shard."""

    preset: str
    remat: str
    model: str
    mesh: dict[str, int]
    microbatches: int
    rows: int = 1
    pipeline: PipelineConfig = PipelineConfig()

    def __str__(self) -> str:
        staged = (
            f"-{self.mesh['pipeline']}x{self.pipeline.chunks}-{self.pipeline.stash}"
            if "pipeline" in self.mesh
            else ""
        )
        return f"{self.preset}-{self.remat}-{self.model}{staged}"

    @property
    def config(self) -> TrainConfig:
        model = dataclasses.replace({"gpt": GPT, "llama": LLAMA}[self.model], remat=self.remat)
        batch = self.rows * self.microbatches * self.mesh.get("data", 1) * self.mesh.get("fsdp", 1)
        loop = TrainLoop(global_batch=batch, microbatches=self.microbatches)
        return TrainConfig(
            model=model, mesh=dataclasses.replace(MeshConfig(data=1), **self.mesh),
            rules=preset(self.preset), train=loop, output=str(self),
            pipeline=self.pipeline,
        )  # fmt: skip


FAST = [
    Program("zero2", "none", "gpt", {"data": 8}, 2),
    Program("zero1+megatron_sp", "save_names", "llama", {"data": 4, "tensor": 4}, 1, rows=2),
    Program("hsdp+megatron", "none", "llama", {"data": 2, "fsdp": 4, "tensor": 4}, 2),
    Program("hsdp+megatron_sp", "full", "gpt", {"data": 4, "fsdp": 4, "tensor": 4}, 2),
]
INPUT = {n: PipelineConfig(chunks=n) for n in (1, 2)}
RESIDUALS = {n: PipelineConfig(chunks=n, stash="residuals") for n in (1, 2)}
STAGED = [
    Program(
        "zero2+megatron_sp",
        "save_names",
        "gpt",
        {"pipeline": 2, "data": 4, "tensor": 4},
        4,
        pipeline=RESIDUALS[2],
    ),
    Program(
        "zero1+megatron_sp",
        "none",
        "gpt",
        {"pipeline": 4, "data": 2, "tensor": 4},
        6,
        pipeline=INPUT[1],
    ),
    Program("ddp", "full", "llama", {"pipeline": 2, "data": 8}, 4, pipeline=INPUT[2]),
    Program(
        "megatron", "full", "gpt", {"pipeline": 2, "data": 2, "tensor": 4}, 4, pipeline=RESIDUALS[1]
    ),
    Program(
        "hsdp+megatron_sp",
        "save_names",
        "llama",
        {"pipeline": 2, "data": 2, "fsdp": 2, "tensor": 4},
        4,
        pipeline=RESIDUALS[1],
    ),
    Program(
        "hsdp+megatron",
        "none",
        "gpt",
        {"pipeline": 2, "data": 2, "fsdp": 2, "tensor": 4},
        4,
        rows=2,
        pipeline=INPUT[1],
    ),
]
GOLDENS = [
    *FAST,
    Program("ddp", "full", "gpt", {"data": 8}, 4),
    Program("fsdp", "save_names", "gpt", {"fsdp": 8}, 2),
    Program("megatron", "full", "llama", {"data": 2, "tensor": 4}, 2),
    Program("megatron_sp", "none", "gpt", {"data": 2, "tensor": 4}, 1, rows=2),
]
"""These have golden ledgers: every preset, remat and model."""
PROGRAMS = [
    *GOLDENS,
    Program("ddp", "none", "llama", {"data": 8}, 1),
    Program("zero1", "none", "llama", {"data": 8}, 2),
    Program("zero2", "full", "llama", {"data": 8}, 4),
    Program("fsdp", "none", "gpt", {"fsdp": 8}, 2),
    Program("fsdp", "full", "llama", {"fsdp": 8}, 1),
    Program("hsdp", "none", "llama", {"data": 4, "fsdp": 4}, 1),
    Program("hsdp", "full", "gpt", {"data": 4, "fsdp": 4}, 2),
    Program("megatron", "none", "gpt", {"data": 2, "tensor": 4}, 1),
    Program("megatron", "save_names", "gpt", {"data": 2, "tensor": 4}, 2),
    Program("megatron_sp", "save_names", "gpt", {"data": 2, "tensor": 4}, 2, rows=2),
    Program("megatron_sp", "offload", "gpt", {"data": 2, "tensor": 4}, 1, rows=2),
    Program("megatron_sp", "full", "llama", {"data": 2, "tensor": 4}, 2),
    Program("zero1+megatron", "none", "gpt", {"data": 4, "tensor": 4}, 2),
    Program("zero2+megatron_sp", "full", "gpt", {"data": 4, "tensor": 4}, 2, rows=2),
    Program("fsdp+megatron_sp", "none", "llama", {"fsdp": 4, "tensor": 4}, 2),
    Program("fsdp+megatron_sp", "full", "gpt", {"fsdp": 4, "tensor": 4}, 1),
    Program("hsdp+megatron", "full", "gpt", {"data": 2, "fsdp": 4, "tensor": 4}, 1),
    Program("hsdp+megatron_sp", "none", "gpt", {"data": 2, "fsdp": 4, "tensor": 4}, 2),
    Program("hsdp+megatron_sp", "save_names", "llama", {"data": 2, "fsdp": 4, "tensor": 4}, 1),
    Program("zero1+hsdp+megatron_sp", "full", "llama", {"data": 4, "fsdp": 2, "tensor": 4}, 2),
    *STAGED,
]

REDUCED = [
    Program("fsdp+reduce_float32", "save_names", "gpt", {"fsdp": 8}, 2),
    Program(
        "hsdp+megatron_sp+reduce_float32", "full", "gpt", {"data": 4, "fsdp": 4, "tensor": 4}, 2
    ),
    Program(
        "hsdp+megatron+reduce_float32", "none", "llama", {"data": 2, "fsdp": 4, "tensor": 4}, 2
    ),
    *(dataclasses.replace(p, preset=f"{p.preset}+reduce_float32") for p in STAGED[4:]),
    Program("ddp+reduce_bfloat16", "full", "gpt", {"data": 8}, 4),
    Program("zero2+reduce_bfloat16", "none", "gpt", {"data": 8}, 2),
    Program(
        "hsdp+megatron_sp+reduce_bfloat16", "full", "gpt", {"data": 4, "fsdp": 4, "tensor": 4}, 2
    ),
    Program(
        "ddp+reduce_bfloat16", "full", "llama", {"pipeline": 2, "data": 8}, 4, pipeline=INPUT[2]
    ),
]
"""With gradients summed in a type that is asked for."""

OF_48 = {"pipeline": 2, "data": 48, "tensor": 8}
"""Replicas that divide neither 1,024 nor 8,192."""
FLAT = [
    Program("distributed", "full", "gpt", {"data": 8}, 2),
    Program("distributed+megatron_sp", "save_names", "gpt", OF_48, 4, pipeline=RESIDUALS[2]),
    Program("distributed", "none", "llama", {"data": 6}, 1),
    Program("distributed+megatron_sp", "full", "gpt", {"data": 48, "tensor": 8}, 2, rows=2),
    Program("distributed+megatron_sp", "none", "llama", {"data": 6, "tensor": 4}, 2, rows=2),
    Program(
        "distributed+megatron_sp",
        "full",
        "llama",
        {"pipeline": 4, "data": 3, "tensor": 4},
        6,
        pipeline=INPUT[1],
    ),
    Program(
        "distributed+hsdp+megatron_sp",
        "save_names",
        "llama",
        {"data": 3, "fsdp": 2, "tensor": 4},
        2,
    ),
    Program("distributed+reduce_bfloat16", "full", "gpt", {"data": 8}, 2),
    Program(
        "distributed+megatron_sp+reduce_bfloat16",
        "save_names",
        "gpt",
        OF_48,
        4,
        pipeline=RESIDUALS[2],
    ),
    Program("zero3+megatron_sp", "save_names", "gpt", OF_48, 4, pipeline=RESIDUALS[2]),
]
"""With the moments and the fp32 weights of matrices as flat vectors, cut over the replicas."""


GATHERED = [
    Program("zero3", "full", "gpt", {"data": 8}, 1),
    Program("zero3+megatron_sp", "save_names", "llama", {"data": 6, "tensor": 4}, 2),
    Program("zero3+megatron+reduce_bfloat16", "none", "gpt", {"data": 4, "tensor": 2}, 1),
]
"""With layers that gather their own matrices of those vectors."""


LONG = {"sequence": 4}
CONTEXT = [
    Program("context_gather+zero3", "save_names", "llama", {"data": 2, **LONG}, 1),
    Program("ulysses", "save_names", "llama", {"data": 2, **LONG}, 1, rows=2),
    Program("ring", "save_names", "llama", {"data": 2, **LONG}, 2),
    Program("usp+distributed", "full", "llama", {"sequence": 4, "extra": ("ulysses=2",)}, 1),
    Program("context_gather+fsdp", "full", "gpt", {"fsdp": 2, **LONG}, 1),
    Program("ulysses+zero3", "none", "llama", {"sequence": 8}, 1),
    Program("ring+megatron", "full", "gpt", {"tensor": 2, **LONG}, 1),
    Program("usp+zero3", "save_names", "llama", {"sequence": 2, "extra": ("ulysses=4",)}, 1),
]
"""With sequences that a mesh axis shards. Ulysses repeats the 4 kv heads for 8 devices."""


def each(programs: list[Program], fast: list[Program], slow: list[Program]) -> list[Any]:
    def mark(p: Program) -> tuple[pytest.MarkDecorator, ...]:
        return () if p in fast else (pytest.mark.slow,) if p in slow else (pytest.mark.exhaustive,)

    return [pytest.param(p, marks=mark(p), id=str(p)) for p in programs]


def compiled(config: TrainConfig, reports: str, devices: int = 0) -> Report:
    """For so many H100s, or as many as the config's mesh has; with stages, under the flags that a
    run with stages has."""
    kept = dataclasses.replace(config.launch, compile_cache=str(Path(reports).parent))
    flags = options("pipeline") if config.mesh.pipeline > 1 else None
    return compile_config(
        dataclasses.replace(config, launch=kept),
        "h100",
        devices or math.prod(config.mesh.sizes().values()),
        flags,
    )


def assert_sends(report: Report, terms: list[Term]) -> None:
    """Payload and wire bytes along each set of mesh axes, to 1 %; axes that carry less than a
    thousandth of all, to that."""
    for field, measured in (
        ("wire_bytes", report.wire_bytes),
        ("payload_bytes", report.payload_bytes),
    ):
        wanted = by_axes(terms, field)
        for axes in wanted.keys() | {one.axes for one in report.collectives}:
            said = f"{report.name}: {field} over {'+'.join(axes)}"
            small = total(terms, field=field) / 1000
            assert measured(axes) == pytest.approx(wanted.get(axes, 0), rel=0.01, abs=small), (
                f"{said}\n{ledger_text(report)}"
            )


NOTICES = {"exposed-communication", "exposed-hop", "whole-copy"}
"""No errors: data-parallel gradients are summed after the last microbatch, with nothing left to
hide them behind; no backward slot hides what stages send while the pipeline fills; copies are of
stages."""
PARTS = {"layer": "layers", "embedding": "embed", "head": "loss"}
"""Of a form -> the model's named scope."""


def residuals(report: Report, terms: list[Term]) -> Counter[tuple[str, str]]:
    """(kind, scope) -> how many times the residual stream is moved over tensor in a step. XLA may
    move several arrays in one collective."""
    residual = next((t.payload for t in terms if t.size == "X"), 0)
    found: Counter[tuple[str, str]] = Counter()
    for one in report.select(axis=["tensor"]):
        for dims in re.findall(r"bf16\[([\d,]+)\]", " ".join(one.shapes)):
            found[one.kind, one.where.part.split("/")[0]] += one.times * (
                2 * math.prod(map(int, dims.split(","))) == residual
            )
    return +found


@pytest.mark.parametrize(
    "program", each([*PROGRAMS, *REDUCED], [*FAST, REDUCED[0]], [GOLDENS[5], STAGED[0], REDUCED[6]])
)
def test_sends_what_the_closed_form_says(reports: str, program: Program) -> None:
    report, terms = compiled(program.config, reports), expected_of(program.config)
    assert not report.warnings
    assert_sends(report, terms)
    wanted: Counter[tuple[str, str]] = Counter()
    for t in terms:
        wanted[t.kind, PARTS.get(t.part, "")] += t.times * (t.size == "X")
    assert residuals(report, terms) == +wanted, ledger_text(report)
    assert all(one.times == 1 for one in report.select(axis="data")), (
        "data parallel pays once a step"
    )
    assert {one.check for one in lint(report, program.config.rules)} <= NOTICES


def test_without_remat_the_weights_are_not_kept(reports: str) -> None:
    """What the backward pass needs of a layer's weights it reads again where they are: no stack of
    them is there twice."""
    report, model = compiled(FAST[0].config, reports), FAST[0].config.model
    assert isinstance(model, DecoderConfig) and model.remat == "none"
    kept = [
        one
        for one in report.memory.buffers
        if one.kind == "weights in use" and f"[{model.n_layers}," in one.shape
    ]
    assert not kept


@pytest.mark.parametrize("program", each(FLAT, FLAT[:1], [FLAT[9]]))
def test_the_distributed_optimizer_adds_up_every_gradient_once(
    reports: str, program: Program
) -> None:
    """A vector a layer, each element of which is reduced once and gathered once, exactly; beside
    them only norms and biases are summed."""
    report, terms = compiled(program.config, reports), expected_of(program.config)
    assert not report.warnings
    assert_sends(report, terms)
    runs, elements, wanted = Counter[tuple](), Counter[tuple](), Counter[tuple]()
    for one in report.select(axis="data"):
        for dtype, n in re.findall(r"(\w+)\[(\d*)\]", " ".join(one.shapes)):
            runs[one.kind, one.axes, dtype, int(n or 1)] += one.times
            elements[one.kind, one.axes, dtype] += one.times * int(n or 1)
    for t in terms:
        if t.part in ("gradients", "weights"):
            wanted[t.kind, t.axes, t.dtype] += int(t.times * t.payload / BYTES[t.dtype])
            assert (
                t.per != "row"
                or runs[t.kind, t.axes, t.dtype, int(t.payload / BYTES[t.dtype])] == t.times
            )
    scalars = SCALAR // BYTES["f32"]
    assert {key: n for key, n in elements.items() if key[0] != "all-reduce"} == {
        key: n for key, n in wanted.items() if key[0] != "all-reduce"
    }
    assert all(
        wanted[key] <= n <= wanted[key] + scalars
        for key, n in elements.items()
        if key[0] == "all-reduce"
    ), ledger_text(report)
    assert {dtype for kind, _, dtype in elements if kind == "all-gather"} == {"bf16"}
    sums = "bf16" if program.config.rules.reduction == "bfloat16" else "f32"
    assert {dtype for kind, _, dtype in elements if kind == "reduce-scatter"} == {sums}
    assert {one.check for one in lint(report, program.config.rules)} <= NOTICES


@pytest.mark.parametrize("program", each(GATHERED, GATHERED[1:2], GATHERED[:2]))
def test_layers_that_gather_their_weights(reports: str, program: Program) -> None:
    report, terms = compiled(program.config, reports), expected_of(program.config)
    assert not report.warnings
    assert_sends(report, terms)
    assert not [one for one in lint(report, program.config.rules) if one.severity == "error"]


@pytest.mark.parametrize("program", each(CONTEXT, CONTEXT[2:3], CONTEXT[3:4]))
def test_attention_exchanges_what_the_closed_form_says(reports: str, program: Program) -> None:
    """And no ring permutes without attention beside it: the network is waited for at its ends at
    most, where nothing is left to do."""
    config = program.config
    report = compiled(config, reports, math.prod(config.mesh.sizes().values()))
    assert not report.warnings
    assert_sends(report, expected_of(config))
    assert {one.check for one in lint(report, config.rules)} <= NOTICES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "program"),
    [
        pytest.param(GOLDENS[5], REDUCED[0], id="fsdp"),
        pytest.param(FAST[3], REDUCED[1], id="hsdp+megatron_sp", marks=pytest.mark.exhaustive),
    ],
)
def test_fp32_sums_change_nothing_but_their_type(
    reports: str, like: Program, program: Program
) -> None:
    auto, asked = (
        [one for one in compiled(p.config, reports).collectives if one.payload > SCALAR]
        for p in (like, program)
    )

    def of_layers(found: list[Collective]) -> dict[str, int]:
        """Runs by type of the layers' reduce-scatters over fsdp."""
        kept = [
            one
            for one in found
            if one.kind == "reduce-scatter" and one.axes == ("fsdp",) and len(one.loops) == 2
        ]
        return {
            one.dtype: sum(other.times for other in kept if other.dtype == one.dtype)
            for one in kept
        }

    def rest(found: list[Collective], but: tuple[str, str]) -> Counter[tuple]:
        counts = Counter[tuple]()
        for one in found:
            if (one.kind, one.dtype) != but or one.axes != ("fsdp",) or len(one.loops) < 2:
                counts[one.kind, one.axes, one.dtype] += int(one.times * one.wire)
        return counts

    assert of_layers(auto) == {"bf16": 4 * 2} and of_layers(asked) == {"f32": 4 * 2}
    assert rest(auto, ("reduce-scatter", "bf16")) == rest(asked, ("reduce-scatter", "f32"))


@pytest.mark.parametrize("program", each(GOLDENS, FAST, [GOLDENS[5]]))
def test_golden_ledger(reports: str, program: Program) -> None:
    path, now = golden(str(program)), ledger_text(compiled(program.config, reports))
    if os.environ.get("MESH_LM_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8")
    said = explain(path.read_text(encoding="utf-8"), now)
    assert not said, (
        f"{program} sends something else than golden/ says (MESH_LM_GOLDEN=write writes it "
        f"anew):\n{said}"
    )


@pytest.mark.exhaustive
def test_an_edit_of_the_rules_is_told_in_words(reports: str) -> None:
    program = next(p for p in GOLDENS if p.preset == "fsdp")
    edited = dataclasses.replace(
        program.config, rules=program.config.rules.replace(params={"norm": "fsdp"})
    )
    said = explain(
        golden(str(program)).read_text(encoding="utf-8"), ledger_text(compiled(edited, reports))
    )
    assert re.search(
        (
            r"^\+ reduce-scatter of f32\[1024\].* over fsdp, 8 x, in backward of "
            r"layers/attention\+mlp: \+ "
        ),
        said,
        re.M,
    ), said
    assert "sent in a step over\n  fsdp" in said


def golden(name: str) -> Path:
    """By version, because which collectives are combined is XLA's choice."""
    return Path(__file__).parent / "golden" / f"jax-{jax.__version__}" / f"{name}.txt"


def without_stages() -> TrainConfig:
    """GPT-3 on 1,024 H100s by FSDP."""
    config = load("configs/gpt_175b.py")
    return dataclasses.replace(
        config, mesh=MeshConfig(data=8, fsdp=16, tensor=8), rules=preset("hsdp+megatron_sp"),
        pipeline=PipelineConfig(),
        train=dataclasses.replace(config.train, microbatches=2),
        model=dataclasses.replace(config.model, remat="full"),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "devices"),
    [
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (("megatron_177b", 6, 2304), ("megatron_314b", 8, 3072))
        ),
        ("gpt_175b", 8, 1024),
    ],
)
def test_a_published_pipeline(reports: str, name: str, stages: int, devices: int) -> None:
    """Compiles with tensor 8 and its published stages, fits, and sends over pipeline what the form
    says, as over all other axes."""
    config = check(load(f"configs/{name}.py"), devices)
    assert (config.mesh.pipeline, config.mesh.tensor) == (stages, 8)
    report, terms = compiled(config, reports), expected_of(config)
    assert report.n_devices == devices and report.fits and not report.warnings
    assert_sends(report, terms)
    assert report.wire_bytes(["pipeline"]) == pytest.approx(by_axes(terms)["pipeline",], rel=0.01)
    assert report.wire_bytes() <= 1.05 * total(terms, field="least_wire_bytes")
    every = [one for one in report.select("collective-permute", "pipeline") if one.loops]
    # of the ticks with both slots
    hops = [one for one in every if one.times == max(other.times for other in every)]
    whole = [
        one for one in report.copies if one.times >= hops[0].times and one.bytes > hops[0].payload
    ]
    assert not whole, f"a stash or gradients are copied in each tick: {whole}"
    assert len(hops) == 2 and all(one.asynchronous for one in hops)
    assert all(one.flops_hidden_behind for one in hops), "a send that spans no slot"
    findings = lint(report, config.rules)
    assert {one.severity for one in findings} <= {"notice"} and {
        one.check for one in findings
    } <= NOTICES


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "rules",
    [
        "hsdp+megatron_sp",
        *(
            pytest.param(r, marks=pytest.mark.exhaustive)
            for r in ("hsdp+megatron", "zero1+hsdp+megatron_sp", "zero2+hsdp+megatron_sp")
        ),
    ],
)
def test_175b_sends_little_more_than_it_must(reports: str, rules: str) -> None:
    """Least: with every table and sum in bf16, a tied table reduced once, and gradients of zero1
    reduce-scattered."""
    config = dataclasses.replace(without_stages(), rules=preset(rules))
    report, terms = compiled(config, reports), expected_of(config)
    assert not report.warnings
    assert_sends(report, terms)
    assert report.wire_bytes() <= 1.05 * total(terms, field="least_wire_bytes")


@pytest.mark.exhaustive
def test_the_program_does_not_grow(reports: str) -> None:
    """Neither with layers nor with devices: its size is that of one block, and a collective is one
    line for any group."""
    config = without_stages()
    size, text = {}, {}
    for layers in (2, 96):
        model = dataclasses.replace(config.model, n_layers=layers)
        report = compiled(dataclasses.replace(config, model=model), reports, 1024)
        size[layers], text[layers] = report.instructions, report.text_bytes
    assert max(size.values()) <= 1.02 * min(size.values()), size
    assert max(text.values()) <= 1.02 * min(text.values()), text
    for devices, mesh in (
        (8, MeshConfig(data=2, fsdp=2, tensor=2)),
        (6144, MeshConfig(data=48, fsdp=16, tensor=8)),
    ):
        loop = dataclasses.replace(config.train, global_batch=2 * mesh.data * mesh.fsdp)
        size[devices] = compiled(
            dataclasses.replace(config, mesh=mesh, train=loop), reports, devices
        ).instructions
    assert size[6144] <= 1.02 * size[8], size
