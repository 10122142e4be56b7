"""The constants of the hardware that move a predicted step most, for several configs.

Compiles each config once, and replays it with each constant at both ends of its stated range
(`mesh-lm plan CONFIG --what-if`). Nothing here is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import sys

from record import Record, Row, options

from mesh_lm.commands.plan_options import Plan
from mesh_lm.commands.what_if import write_tornado
from mesh_lm.config import load
from mesh_lm.planning.program import compile_config, flags_of
from sharding_rules.lab import flags
from sharding_rules.lab.replayed import what_if

CASES = (("gpt_175b", 1024), ("gpt_1_3b", 16), ("megatron_70b", 768))
"""Config, and GPUs."""


def main(arguments: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    machine = Plan(hw=arguments.hw, plan="screen").machine
    target = machine.target.name
    record = Record(f"what_if{'-quick' * arguments.quick}", arguments.output, kind=machine.name)
    record.data["charts"] = []
    cases = (("gpt_tiny", 8),) if arguments.quick else CASES
    for name, n_devices in cases:
        if arguments.configs and name not in arguments.configs.split(","):
            continue
        config = load(name)
        xla_flags = flags.options(flags_of(config, target))
        report = compile_config(config, machine, n_devices, xla_flags)
        result = what_if(report, machine)
        rows: list[Row] = []
        for effect in result.effects:
            rows.append(
                {
                    "constant": effect.constant.name,
                    "from": effect.low_text,
                    "to": effect.high_text,
                    "range_is": effect.source,
                    "step_at_from_s": effect.low_us / 1e6,
                    "step_at_to_s": effect.high_us / 1e6,
                    "effect": effect.us(result.base_us) / result.base_us,
                }
            )
        note = f"Step {result.base_us / 1e6:.4g} s at the fast ends, predicted, never measured."
        record.table(f"{name} on {n_devices:,} x {machine.name}", rows, note)
        chart = f"{record.stem}_{name}.png"
        record.directory.mkdir(parents=True, exist_ok=True)
        write_tornado(
            result, f"{name} on {n_devices:,} x {machine.name}", str(record.directory / chart)
        )
        record.data["charts"].append(chart)
        record.write()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options(__doc__ or "")
    parser.add_argument("--hw", default="h100", help="as in mesh-lm plan --hw")
    parser.add_argument("--configs", default="", help="some of the configs")
    return parser


if __name__ == "__main__":
    sys.exit(main(_parser().parse_args()))
