"""`python train.py --config=FILE --plan`: what the run would do on GPUs that are not here. Nothing is trained, no data is read."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from mesh_lm import cli
from mesh_lm.config import ConfigError, TrainConfig
from mesh_lm.plan import attention, held, stages
from mesh_lm.plan.changes import candidates
from mesh_lm.plan.microbatch import largest
from mesh_lm.plan.program import Program, compile_config, devices_for, flags_of
from sharding_rules import ShardingRuleError
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.fixes import Fix, rank
from sharding_rules.lab.flags import FLAG_SETS, options
from sharding_rules.lab.lint import Finding, lint
from sharding_rules.lab.lint_reductions import reduced
from sharding_rules.lab.saved import TRACE, content, write
from sharding_rules.lab.summary import alike, flop, headline, whose
from sharding_rules.lab.targets import TARGETS
from sharding_rules.lab.text import screen

_SCREEN = "screen"
_NAMES = ("plan", "target", "devices", "max_microbatch", "flags")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to plan for."""

    plan: str = ""
    """Where the report goes: the screen, or a file that ends in .html (a page with charts), .trace.json (for Perfetto) or .json."""
    target: str = "h100"
    """The GPU: h100, h200, a100 or b200."""
    devices: int = 0
    """How many of them; 0: as many as the mesh says, with an axis of -1 the fewest whole nodes."""
    max_microbatch: bool = False
    """Find by compiling how many sequences a microbatch can have on each device."""
    flags: str = "auto"
    """The set of XLA flags to compile with (see sharding_rules/lab/flags.py); auto: the run's own (launch.xla_flags)."""

    def __post_init__(self) -> None:
        for name, known in (("target", TARGETS), ("flags", ("auto", *FLAG_SETS))):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"--{name}={value}: expected one of {', '.join(known)}")
        if self.devices < 0:
            raise ConfigError(f"--devices={self.devices} must be at least 1")
        if self.plan != _SCREEN and Path(self.plan).suffix not in (".html", ".json"):
            raise ConfigError(f"--plan={self.plan}: expected a file that ends in .html or .json, or nothing for the screen")


def asked(argv: list[str]) -> tuple[Plan | None, list[str]]:
    """The plan that a command line asks for, None without --plan, and the rest of its words. Raises ConfigError for a mistake in it."""
    own, rest, alone = [], [], {"plan": _SCREEN, "max_microbatch": "true"}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, given, _ = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in _NAMES:
            rest.append(word)
        elif given:
            own.append(word)
        elif words and not words[0].startswith("--") and name != "max_microbatch":
            own.append(f"{word}={words.pop(0)}")
        else:
            own.append(f"{word}={alone[name]}" if name in alone else word)
    if any(word.startswith("--plan") for word in own) and {"--help", "-h"} & set(rest):
        own.append("--help")
    if not any(word.startswith("--plan") for word in own):
        if own:
            raise ConfigError(f"{own[0]} goes with --plan: python train.py --config=FILE --plan {own[0]}")
        return None, argv
    return cli.command(Plan, own, "What a run would do on GPUs that are not here."), rest


def show(plan: Plan, config: TrainConfig) -> int:
    """Compiles the config's step and reports it. The status: 0, or 1 where it does not fit into the memory of the target.

    Raises ConfigError for a config that cannot run, and where the compiler is missing or fails.
    """
    jax.config.update("jax_platforms", "cpu")  # XLA would take a GPU that is here, and its memory, to compile for those that are not
    n_devices = devices_for(config, plan.devices)
    flags = flags_of(config, plan.target) if plan.flags == "auto" else plan.flags

    def compiled(changed: TrainConfig) -> Report:
        try:
            return compile_config(changed, plan.target, n_devices, options(flags))
        except ShardingRuleError as error:  # rules that lack a row for an axis of the user's own model
            raise LabError(str(error)) from error

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        program = Program.of(config, plan.target, n_devices)
        if plan.plan != _SCREEN:
            say(f"compiling {Path(config.output).name} for {n_devices:,} x {plan.target}")
        report = program.compile(options(flags))
        say_verdict = plan.plan != _SCREEN or not report.fits
        if say_verdict:  # before a search, which may be cut short
            say(f"{report.name} on {n_devices:,} x {plan.target}: {headline(report)}")
        findings = lint(report, config.rules, program.blueprint.axes)
        fixes = () if report.fits else rank(report, candidates(config, n_devices, compiled), say=say)
        facts = (*_facts(config, report), *held.facts(program.declared), *stages.facts(program.config, program.blueprint, report))
        if plan.max_microbatch:
            facts += largest(config, n_devices, compiled, say=say)
    except LabError as error:
        raise ConfigError(str(error)) from error
    state = {name: part.nbytes for name, part in program.declared.items()}
    _write(plan, report, findings, fixes, facts, state)
    if not report.fits:
        raise ConfigError(refusal(report, fixes))
    return 0


def refusal(report: Report, fixes: Sequence[Fix]) -> str:
    """Why a run cannot go on this target: what is in the way, and what would help, best first."""
    gib = 2**30
    lines = [f"{report.name} needs {report.peak_bytes / gib:.1f} GiB on each device, and {report.target} has {report.hbm / gib:.1f}"]
    for n, b in alike(report.memory.buffers)[:5]:
        arrays = f"{n} x {b.shape}" if n > 1 else b.shape
        lines.append(f"  - in the way: {n * b.bytes / gib:.2f} GiB of {b.kind}: {arrays}, {whose(b)}")
    lines += [f"  - {fix}" for fix in fixes[:5]]
    return "\n".join(lines)


def _facts(config: TrainConfig, report: Report) -> tuple[tuple[str, str], ...]:
    model, train = config.model, config.train
    facts = [
        ("rules", config.rules.name),
        ("batch", f"{train.global_batch} sequences of {model.seq_len}, {train.microbatches} microbatch{'es' * (train.microbatches > 1)}"),
    ]
    if sums := reduced(report, config.rules):
        facts.append(("gradients", f"summed in {sums} (rules.reduction={config.rules.reduction})"))
    if n_params := getattr(model, "n_params", None):
        facts.insert(0, ("parameters", f"{n_params() / 1e9:.4g} B"))
    if report.model_flops:
        compiled = sum(report.flops.values())
        facts.append(("matmuls", f"{flop(compiled)} per device and step, {compiled / report.model_flops:.2f} x the model's"))
    return (*facts, *attention.facts(config, report, report.target))


def _write(
    plan: Plan,
    report: Report,
    findings: Sequence[Finding],
    fixes: Sequence[Fix],
    facts: Sequence[tuple[str, str]],
    state: Mapping[str, int],
) -> None:
    if plan.plan == _SCREEN:
        Console().print(screen(report, findings, fixes, facts))
        return
    path = Path(plan.plan).expanduser()
    if path.name.endswith((".html", TRACE)):
        text = content(path.name, report, findings, fixes, facts)
    else:
        text = json.dumps(
            {
                "report": json.loads(report.to_json()),
                "findings": [dataclasses.asdict(one) for one in findings],
                "fixes": [_plain(fix) for fix in fixes],
                "facts": dict(facts),
                "state": state,
            }
        )
    try:
        write(str(path), text)
    except LabError as error:
        raise ConfigError(str(error).replace("cannot write ", "cannot write --plan=", 1)) from error
    print(f"wrote {path}")


def _plain(fix: Fix) -> dict[str, Any]:
    return {
        "kind": fix.kind, "text": fix.text, "saves": fix.saves, "cost": fix.cost, "fits": fix.fits, "peak_bytes": fix.report.peak_bytes,
    }  # fmt: skip
