"""The tables of docs/memory.md, from the results of benchmarks/offload.py and
benchmarks/memory_choices.py: tests/docs/made.py writes them into the page."""

from __future__ import annotations

from tests.docs.markdown import table
from tests.docs.planner_tables import tables_of


def offloaded() -> str:
    """Returns a row for each compiled step."""
    rows = []
    for row in tables_of("offload")["Memory of a GPU and of its host"]:
        has_copies = row["copied_gib"] > 0
        rows.append(
            [
                f"`{row['config']}`",
                f"{row['gpus']}",
                f"`{row['rules']}`",
                f"{row['tokens']:,}",
                f"`{row['offload']}`" if has_copies else "nothing",
                f"{row['peak_gib']:.1f}" + ("" if row["fits"] else ", does not fit"),
                f"{row['host_gib']:.1f}",
                f"{row['copied_gib']:.1f}",
                f"{row['pcie_s']:.2f} to {row['pcie_slow_s']:.2f}" if has_copies else "0",
                f"{row['step_s']:.2f} to {row['step_slow_s']:.2f}",
            ]
        )
    head = [
        "config",
        "GPUs",
        "rules",
        "sequence",
        "on the host",
        "GiB of a GPU",
        "GiB of the host",
        "GiB copied",
        "PCIe, s",
        "step, s",
    ]
    return table(head, rows)


def chosen() -> str:
    """Returns a row for each way to save memory."""
    rows = []
    for row in tables_of("memory_choices")["One model with each way to save memory"]:
        of_state = [row.get(f"{kind}_gib") or 0 for kind in ("params", "moments", "gradients")]
        of_layers = sum(
            row.get(f"{kind}_gib") or 0 for kind in ("residuals", "activations", "logits")
        )
        rows.append(
            [
                row["group"],
                row["name"],
                f"{row['peak_gib']:.1f}" + ("" if row["fits"] else ", does not fit"),
                *(f"{gib:.1f}" for gib in of_state),
                f"{of_layers:.1f}",
                f"{row['peak_gib'] - sum(of_state) - of_layers:.1f}",
                f"{row['host_gib']:.1f}",
                f"{row['step_s']:.2f} to {row['step_slow_s']:.2f}",
            ]
        )
    head = [
        "by",
        "with",
        "GiB of a GPU",
        "weights",
        "master and moments",
        "gradients",
        "activations",
        "others",
        "GiB of the host",
        "step, s",
    ]
    return table(head, rows)


TABLES = {"offload": offloaded, "memory choices": chosen}
