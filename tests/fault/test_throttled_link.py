"""Two hosts with a slow link between them: islands (DiLoCo) send over it once every few steps what
data parallelism sends in each."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from fault.hosts import sent_bytes, throttle
from fault.job import Job, arguments

from mesh_lm.commands.command_line import parse
from mesh_lm.planning.diloco import wire_bytes
from mesh_lm.training.check import check

pytestmark = pytest.mark.fault
EVERY, FROM, TO = 5, 6, 16
"""Steps between two outer steps, and the steps between which bytes are counted: two outer steps are
among them."""
SIZES = {"model__d_model": 128, "model__d_ff": 512, "checkpoint__every": 0, "mesh__fsdp": 2}
PLAIN = {**SIZES, "rules": "hsdp", "mesh__data": 2}
APART = {
    **SIZES,
    "rules": "diloco+fsdp",
    "mesh__data": 1,
    "mesh__island": 2,
    "diloco__outer_steps": EVERY,
}


def trained(hosts: tuple[str, str], settings: list[str], faults: Path) -> tuple[int, float]:
    """Returns (bytes that the first host sent from step FROM to step TO, the seconds that this
    took)."""
    where = ["--nodes=2", "--rendezvous=10.77.0.1:9876"]
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                Job(
                    faults,
                    settings,
                    workers=1,
                    MESH_LM_PACE="0.2",
                    options=[*where, f"--node={i}"],
                    prefix=["ip", "netns", "exec", host],
                )
            )
            for i, host in enumerate(hosts)
        )
        began = first.wait(rf"step +{FROM}/")
        before = sent_bytes(hosts[0], 0)
        ended = first.wait(rf"step +{TO}/")
        sent = sent_bytes(hosts[0], 0) - before
        assert (first.ended(), second.ended()) == (0, 0), f"{first.log}\n{second.log}"
    return sent, ended - began


def test_islands_send_less_over_a_slow_link(
    hosts: tuple[str, str],
    data: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """By the interface's own counter. Data parallelism sums the gradients in each of ten steps,
    islands the weights in two of them."""
    for i, host in enumerate(hosts):
        throttle(host, i, "50mbit")
    plain = trained(hosts, arguments(data, tmp_path / "plain", **PLAIN), tmp_path / "faults")
    apart = trained(hosts, arguments(data, tmp_path / "apart", **APART), tmp_path / "faults")
    model = check(parse(arguments(data, tmp_path / "plain", **PLAIN)), 4).model
    weights = 4 * model.n_params()  # of the two devices of a host together
    for (sent, _), every in ((plain, 1), (apart, EVERY)):
        on_paper = (TO - FROM) * wire_bytes(weights, 2, every)
        assert on_paper < sent < 1.08 * on_paper, (
            f"every {every} steps: {sent:,} bytes, {on_paper:,.0f} on paper"
        )
    record_property("sent_bytes_of_data_parallelism_and_islands", f"{plain[0]}, {apart[0]}")
    record_property("seconds_of_data_parallelism_and_islands", f"{plain[1]:.1f}, {apart[1]:.1f}")
