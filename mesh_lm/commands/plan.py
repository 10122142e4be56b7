"""`mesh-lm plan FILE`: what a run would do on GPUs that you do not have. Nothing is trained, and no
data is read.

`python train.py --config=FILE --plan` is the same.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from mesh_lm.commands import command_line
from mesh_lm.commands.plan_options import SCREEN as SCREEN
from mesh_lm.commands.plan_options import Plan as Plan
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.planning import attention, stages, state_bytes
from mesh_lm.planning import diloco as islands
from mesh_lm.planning.changes import candidates
from mesh_lm.planning.microbatch import largest_microbatch
from mesh_lm.planning.program import Program, compile_config, devices_for, flags_of
from sharding_rules import Rules, ShardingRuleError
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.fixes import Fix, rank
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import Finding, lint
from sharding_rules.lab.lint_reductions import reduced
from sharding_rules.lab.saved import TRACE, content, load, require_writable, write
from sharding_rules.lab.summary import alike, amount, flop, headline, ratios, whose
from sharding_rules.lab.text import screen
from sharding_rules.lab.why import why


def show(plan: Plan, config: TrainConfig) -> int:
    """Compiles the config's step and reports it. The status: 0, or 1 where it does not fit into the
    memory of the target.

    Raises ConfigError for a config that cannot run, and where the compiler is missing or fails.
    """
    # XLA would take a GPU that is here, and its memory, to compile for those that are not
    jax.config.update("jax_platforms", "cpu")
    n_devices = devices_for(config, plan.devices)
    flags = flags_of(config, plan.target) if plan.flags == "auto" else plan.flags

    def compiled(changed: TrainConfig) -> Report:
        try:
            return compile_config(changed, plan.target, n_devices, options(flags))
        except (
            ShardingRuleError
        ) as error:  # rules that lack a row for an axis of the user's own model
            raise LabError(str(error)) from error

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        if plan.plan != SCREEN:
            require_writable(plan.plan)
        against = _against(plan, n_devices) if plan.against else None
        program = Program.of(config, plan.target, n_devices)
        if plan.plan != SCREEN:
            say(f"compiling {Path(config.output).name} for {n_devices:,} x {plan.target}")
        report, outer = program.compile(options(flags)), program.compile_outer(options(flags))
        if plan.plan != SCREEN or not report.fits:  # before a search, which may be interrupted
            say(f"{report.name} on {n_devices:,} x {plan.target}: {headline(report)}")
        findings = lint(report, config.rules, program.layout.axes)
        fixes = (
            () if report.fits else rank(report, candidates(config, n_devices, compiled), say=say)
        )
        facts = (
            *_facts(config, report),
            *state_bytes.report_facts(program.declared),
            *stages.report_facts(program.config, program.layout, report),
            *islands.report_facts(config, report, outer),
        )
        if plan.max_microbatch:
            facts += largest_microbatch(config, n_devices, compiled, say=say)
        compared = why(report, against) if against else ""
    except LabError as error:
        raise ConfigError(str(error)) from error
    state = {name: part.nbytes for name, part in program.declared.items()}
    _write(plan, report, findings, fixes, facts, state)
    if compared:
        print(compared)
    if not report.fits:
        raise ConfigError(refusal(report, fixes))
    return 0


def _against(plan: Plan, n_devices: int) -> Report:
    """Returns the report to compare with: a saved one, or that of another config on the same
    devices.

    Raises LabError and ConfigError where there is none. A config of another size of mesh takes as
    many devices as its own mesh has.
    """
    path = Path(plan.against).expanduser()
    if path.suffix == ".json" and path.name != "config.json":
        return load(plan.against)
    config = command_line.parse([f"--config={plan.against}"])
    flags = flags_of(config, plan.target) if plan.flags == "auto" else plan.flags
    devices = devices_for(
        config, plan.devices or (n_devices if -1 in config.mesh.sizes().values() else 0)
    )
    report = compile_config(config, plan.target, devices, options(flags))
    return dataclasses.replace(report, name=Path(plan.against).stem)


def refusal(report: Report, fixes: Sequence[Fix]) -> str:
    """Why a run cannot go on this target: what is in the way, and what would help, best first."""
    gib = 2**30
    lines = [
        (
            f"{report.name} needs {report.peak_bytes / gib:.1f} GiB on each device, and "
            f"{report.target} has {report.hbm / gib:.1f}"
        )
    ]
    for n, b in alike(report.memory.buffers)[:5]:
        arrays = f"{n} x {b.shape}" if n > 1 else b.shape
        lines.append(
            f"  - in the way: {n * b.bytes / gib:.2f} GiB of {b.kind}: {arrays}, {whose(b)}"
        )
    lines += [f"  - {fix}" for fix in fixes[:5]]
    return "\n".join(lines)


def _facts(config: TrainConfig, report: Report) -> tuple[tuple[str, str], ...]:
    model, train = config.model, config.train
    facts = [
        ("rules", config.rules.name),
        (
            "batch",
            (
                f"{train.global_batch} sequences of {model.seq_len}, {train.microbatches} "
                f"microbatch{'es' * (train.microbatches > 1)}"
            ),
        ),
    ]
    if sums := reduced(report, config.rules):
        facts.append(("gradients", f"summed in {sums} (rules.reduction={config.rules.reduction})"))
    if n_params := getattr(model, "n_params", None):
        facts.insert(0, ("parameters", amount(n_params())))
    if report.model_flops:
        compiled = sum(report.flops.values())
        facts.append(
            (
                "matmuls",
                (
                    f"{flop(compiled)} per device and step, {compiled / report.model_flops:.2f} x "
                    "the model's"
                ),
            )
        )
    return (*facts, *attention.report_facts(config, report, report.target))


def _write(
    plan: Plan,
    report: Report,
    findings: Sequence[Finding],
    fixes: Sequence[Fix],
    facts: Sequence[tuple[str, str]],
    state: Mapping[str, int],
) -> None:
    if plan.plan == SCREEN:
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
                "ratios": ratios(report),
            }
        )
    try:
        write(str(path), text)
    except LabError as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {path}")


def _plain(fix: Fix) -> dict[str, Any]:
    return {
        "kind": fix.kind, "text": fix.text, "saves": fix.saves, "cost": fix.cost, "fits": fix.fits,
        "peak_bytes": fix.report.peak_bytes,
    }  # fmt: skip


def under_rules(argv: list[str], rules: Rules, target: str, devices: int) -> Report:
    """For `python -m sharding_rules diff`: the config that train.py's words mean, under these
    rules. Raises as `compile_config`.
    """
    config = dataclasses.replace(command_line.parse(argv), rules=rules)
    report = compile_config(
        config, target, devices_for(config, devices), options(flags_of(config, target))
    )
    return dataclasses.replace(report, name=f"{report.name} under {rules.name}")
