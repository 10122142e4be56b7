"""`mesh-lm plan FILE`: what a run would do on GPUs that you do not have.

Nothing is trained, and no data is read. `python train.py --config=FILE --plan` is the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from mesh_lm.commands import command_line
from mesh_lm.commands.plan_options import SCREEN as SCREEN
from mesh_lm.commands.plan_options import Plan as Plan
from mesh_lm.commands.what_if import show_what_if
from mesh_lm.config import TrainConfig
from mesh_lm.config.layout import saved_layout
from mesh_lm.errors import ConfigError
from mesh_lm.planning import attention, best, diloco, experts, run_cost, stages, state_bytes
from mesh_lm.planning.best_table import command_of, found_table
from mesh_lm.planning.changes import candidates
from mesh_lm.planning.climb import climb
from mesh_lm.planning.microbatch import largest_microbatch
from mesh_lm.planning.program import (
    Program,
    compile_config,
    devices_for,
    flags_of,
    mesh_for,
)
from sharding_rules import Rules, ShardingRuleError
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.fixes import Candidate, Fix, rank
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import Finding, lint
from sharding_rules.lab.lint_reductions import reduced
from sharding_rules.lab.machine import Machine
from sharding_rules.lab.saved import TRACE, content, load, require_writable, write
from sharding_rules.lab.summary import alike, amount, flop, headline, ratios, whose
from sharding_rules.lab.targets import require_whole_nodes
from sharding_rules.lab.text import screen
from sharding_rules.lab.why import why

GIB = 2**30
_LISTED = 5
"""The most arrays, and the most fixes, that a refusal lists."""
Fact = tuple[str, str]
"""A line of the report: its label and its text."""


def show(plan: Plan, config: TrainConfig) -> int:
    """Compiles the config's step and reports it. Returns the status 0.

    Raises ConfigError for a config that cannot run or does not fit into the memory of the target,
    and if the compiler is missing or fails.
    """
    # XLA would take a GPU that is here, and its memory, to compile for those that are not.
    jax.config.update("jax_platforms", "cpu")
    if plan.best:
        return show_best(plan, config)
    n_devices = devices_for(config, plan.devices, plan.machine.target.node)
    flags = _flag_set(plan, config)

    def compile_changed(changed: TrainConfig) -> Report:
        try:
            changed_flags = options(_flag_set(plan, changed))
            return compile_config(changed, plan.machine, n_devices, changed_flags)
        except ShardingRuleError as error:
            # Rules that lack a row for an axis of the user's own model.
            raise LabError(str(error)) from error

    try:
        if plan.plan != SCREEN:
            require_writable(plan.plan)
        against = _against(plan, n_devices) if plan.against else None
        program = Program.of(config, plan.machine, n_devices)
        if plan.plan != SCREEN:
            _log(f"compiling {Path(config.output).name} for {n_devices:,} x {plan.machine.name}")
        report = program.compile(options(flags))
        if plan.what_if:
            show_what_if(report, plan.machine, "" if plan.plan == SCREEN else plan.plan)
            if not report.fits:
                raise ConfigError(refusal(report, ()))
            return 0
        outer_report = program.compile_outer(options(flags))
        # Before the search for fixes, which may be interrupted.
        if plan.plan != SCREEN or not report.fits:
            _log(f"{report.name} on {n_devices:,} x {plan.machine.name}: {headline(report)}")
        findings = lint(report, config.rules, program.layout.axes)
        fixes: Sequence[Fix] = ()
        if not report.fits:
            candidates_of_run = fix_candidates(
                config, report, n_devices, compile_changed, plan.machine
            )
            fixes = rank(report, candidates_of_run, say=_log)
        facts = [
            *run_cost.hardware_facts(report),
            *_facts(config, report),
            *run_cost.report_facts(config, report, plan.tokens, plan.gpu_hour),
            *state_bytes.report_facts(program.declared),
            *stages.report_facts(program.config, program.layout, report),
            *diloco.report_facts(config, report, outer_report),
        ]
        if plan.max_microbatch:
            facts += largest_microbatch(
                *(config, n_devices, compile_changed),
                say=_log,
                on_paper=lambda changed: best.peak_on_paper(changed, n_devices, plan.machine),
            )
        comparison = why(report, against) if against else ""
    except LabError as error:
        raise ConfigError(str(error)) from error
    state = {name: part.nbytes for name, part in program.declared.items()}
    run = run_cost.RunSize.of(config)
    _write(plan, report, findings, fixes, facts, state, run)
    if comparison:
        print(comparison)
    if not report.fits:
        raise ConfigError(refusal(report, fixes))
    return 0


def fix_candidates(
    config: TrainConfig,
    report: Report,
    n_devices: int,
    compiled: Callable[[TrainConfig], Report],
    hardware: str | Machine = "",
) -> Iterator[Candidate]:
    """Yields what may make a run fit: the layout that is expected to be the fastest that fits, and
    then single changes and pairs.
    """
    layout = best.fitting_candidate(config, report, compiled, hardware)
    if layout:
        yield layout
    yield from candidates(config, n_devices, compiled)


def show_best(plan: Plan, config: TrainConfig) -> int:
    """Searches for the fastest layout, prints those that were compiled, and the command that trains
    with the best. Returns the status 0.

    Raises ConfigError as `show`, also if nothing fits, and for what a search cannot do.
    """
    machine = plan.machine
    n_devices = devices_for(config, plan.devices, machine.target.node)

    def compiled(changed: TrainConfig) -> Report:
        flags = options(_flag_set(plan, changed))
        try:
            return compile_config(changed, machine, n_devices, flags)
        except (ConfigError, ShardingRuleError) as error:
            raise LabError(str(error)) from error

    kept = best.parse_kept(plan.keep)
    try:
        if plan.save:
            require_writable(plan.save)
        require_whole_nodes(machine.target, n_devices)
        mesh_for(machine, n_devices)  # first, as without a compiler nothing is worth a try
        no_formulas = best.why_only_compiled(config)
        find = functools.partial(climb, reason=no_formulas) if no_formulas else best.search
        found = find(
            *(config, n_devices, machine, compiled),
            compiles=plan.compiles or best.COMPILES,
            kept=kept,
            most_tensor=plan.max_tensor,
            say=_log,
        )
        if plan.save and found.best:
            write(plan.save, _layout(found.best, config, n_devices, machine.name))
    except LabError as error:
        raise ConfigError(str(error)) from error
    console = Console()
    console.print(found_table(found))
    command = command_of(found, plan.typed_run)
    if command:
        # In one line, which can be pasted: the console would break it.
        print(command)
    if found.best:
        report = found.best.report
        facts = [
            *run_cost.hardware_facts(report),
            *run_cost.report_facts(config, report, plan.tokens, plan.gpu_hour),
        ]
        for label, text in facts:
            console.print(f"{label}: {text}", highlight=False)
    if plan.save and found.best:
        print(f"wrote {plan.save}; --mesh={plan.save} reads it")
    if not found.best:
        smallest = min(
            (trial.report for trial in found.candidates), key=lambda report: report.peak_bytes
        )
        fewest = best.fewest_devices(
            *(config, n_devices, machine), kept=kept, most_tensor=plan.max_tensor
        )
        advice = f"\n  - on paper it fits from {fewest:,} devices on" if fewest else ""
        raise ConfigError(refusal(smallest, ()) + advice)
    return 0


def _layout(trial: best.Trial, config: TrainConfig, n_devices: int, target: str) -> str:
    band = trial.report.step_band
    facts = {
        "target": target,
        "step_s": [us / 1e6 for us in band] if band else None,
        "peak_gib": round(trial.report.peak_bytes / GIB, 2),
    }
    return saved_layout(config, trial.fields, n_devices, facts)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _flag_set(plan: Plan, config: TrainConfig) -> str:
    return flags_of(config, plan.machine.target.name) if plan.flags == "auto" else plan.flags


def _against(plan: Plan, n_devices: int) -> Report:
    """Returns the report to compare with: a saved one, or that of another config.

    The config is compiled for the same devices. One with another size of mesh takes as many devices
    as its own mesh has.

    Raises LabError and ConfigError if there is no such report or config.
    """
    path = Path(plan.against).expanduser()
    if path.suffix == ".json" and path.name != "config.json":
        return load(plan.against)
    config = command_line.parse([f"--config={plan.against}"])
    devices = plan.devices
    if not devices and -1 in config.mesh.sizes().values():
        devices = n_devices
    flags = options(_flag_set(plan, config))
    report = compile_config(config, plan.machine, devices_for(config, devices), flags)
    return dataclasses.replace(report, name=Path(plan.against).stem)


def refusal(report: Report, fixes: Sequence[Fix]) -> str:
    """Returns why a run does not fit on this target: the largest arrays, and the best fixes."""
    lines = [
        f"{report.name} needs {report.peak_bytes / GIB:.1f} GiB on each device and a margin of "
        f"{report.margin:.0%}, and {report.target} has {report.hbm / GIB:.1f}"
    ]
    for n, buffer in alike(report.memory.buffers)[:_LISTED]:
        arrays = f"{n} x {buffer.shape}" if n > 1 else buffer.shape
        lines.append(
            f"  - in the way: {n * buffer.bytes / GIB:.2f} GiB of {buffer.kind}: {arrays}, "
            f"{whose(buffer)}"
        )
    lines += [f"  - {fix}" for fix in fixes[:_LISTED]]
    return "\n".join(lines)


def _facts(config: TrainConfig, report: Report) -> list[Fact]:
    model = config.model
    facts: list[Fact] = []
    n_params = getattr(model, "n_params", None)
    if n_params:
        n_idle = getattr(model, "n_idle_params", int)()
        active = f", {amount(n_params() - n_idle)} of them active" if n_idle else ""
        facts.append(("parameters", amount(n_params()) + active))
    facts.append(("rules", config.rules.name))
    n_microbatches = config.train.microbatches
    facts.append(
        (
            "batch",
            f"{config.train.global_batch} sequences of {model.seq_len}, {n_microbatches} "
            f"microbatch{'es' if n_microbatches > 1 else ''}",
        )
    )
    sums = reduced(report, config.rules)
    if sums:
        facts.append(("gradients", f"summed in {sums} (rules.reduction={config.rules.reduction})"))
    if report.model_flops:
        compiled_flops = sum(report.flops.values())
        ratio = compiled_flops / report.model_flops
        text = f"{flop(compiled_flops)} per device and step, {ratio:.2f} x the model's"
        facts.append(("matmuls", text))
    facts += experts.report_facts(config)
    return [*facts, *attention.report_facts(config, report, report.target)]


def _write(
    plan: Plan,
    report: Report,
    findings: Sequence[Finding],
    fixes: Sequence[Fix],
    facts: Sequence[Fact],
    state: Mapping[str, int],
    run: run_cost.RunSize,
) -> None:
    """Prints the report, or writes it to the plan's file."""
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
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "fixes": [_plain(fix) for fix in fixes],
                "facts": dict(facts),
                "state": state,
                "run": run._asdict(),
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
        "kind": fix.kind,
        "text": fix.text,
        "saves": fix.saves,
        "cost": fix.cost,
        "fits": fix.fits,
        "peak_bytes": fix.report.peak_bytes,
    }


def under_rules(argv: list[str], rules: Rules, target: str, devices: int) -> Report:
    """Returns the report of a run with other rules, for `python -m sharding_rules diff`.

    argv: the words of train.py. Raises as `compile_config`.
    """
    config = dataclasses.replace(command_line.parse(argv), rules=rules)
    n_devices = devices_for(config, devices)
    report = compile_config(config, target, n_devices, options(flags_of(config, target)))
    return dataclasses.replace(report, name=f"{report.name} under {rules.name}")
