"""Targets with changed constants, profiles as hardware, and reports replayed at other speeds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import lab_report
import numpy as np
import pytest
from jax.sharding import Mesh

from sharding_rules.lab import LabError, hlo
from sharding_rules.lab.ledger import collectives
from sharding_rules.lab.lint_placement import TARGETS
from sharding_rules.lab.machine import CONSTANTS, Machine, constants_of, machine_of
from sharding_rules.lab.prices import collective_us
from sharding_rules.lab.profile import Fit, Matmul, Measured, Point, Profile, load_profile
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import OPTIMISTIC, SUSTAINED
from sharding_rules.lab.replayed import Replay, compiled_on, suspects, what_if
from sharding_rules.lab.report import Change, Collective, Location, Report, packed, unpacked
from sharding_rules.lab.summary import rates_words
from sharding_rules.lab.vocabulary import NEUTRAL

GATHER = (
    "%s = bf16[{shard}]{{0}} parameter(2)\n"
    "  %g = bf16[{size}]{{0}} all-gather(%s), channel_id=1, "
    "replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}, use_global_device_ids=true"
)
MATMUL = "%d = f32[8192,8192]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
NEGATE = "%n = bf16[134217728]{0} negate(%p)"
HEAD = (
    "HloModule test, is_scheduled=true\n\n"
    "ENTRY %main (a: bf16[134217728], b: f32[8192,8192]) -> bf16[134217728] {\n"
    "  %p = bf16[134217728]{0} parameter(0)\n  %m = bf16[8192,8192]{1,0} parameter(1)\n"
)


def saved(*lines: str, nodes: int = 1, **changes: Any) -> Report:
    """Returns the report of a program of these lines, whose gathers span this number of nodes."""
    text = HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"
    module = hlo.parse(text)
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    sent = collectives(module, Provenance(module), mesh)
    sent = tuple(dataclasses.replace(one, nodes=nodes) for one in sent)
    report = lab_report.report(
        collectives=sent, program=packed(text), slots=(), options={}, vocabulary=NEUTRAL
    )
    report = dataclasses.replace(report, target="h100", conditionals=(), **changes)
    return Replay(report).on(Machine.of("h100"))


def gather(n_bytes: int) -> str:
    """Returns the lines of a gather to so many bytes."""
    return GATHER.format(shard=n_bytes // 16, size=n_bytes // 2)


def test_a_program_is_packed_without_loss() -> None:
    text = "ENTRY %main µ\n" * 5000
    assert unpacked(packed(text)) == text and len(packed(text)) < len(text) // 50
    with pytest.raises(LabError, match="damaged"):
        unpacked(packed(text)[:-40])
    report = saved(NEGATE)
    assert Report.from_json(report.to_json()) == report


def test_a_constant_has_one_value_at_both_ends() -> None:
    machine = Machine.of("h100,nic=25,matmul=0.6,start_us=3,attention=0.5")
    assert machine.target.network == 25e9
    for rates in (machine.fast, machine.slow):
        assert rates.matmul.value == 0.6
        assert rates.matmul_table.value == pytest.approx(0.6 / 0.758)
        assert rates.start_us.value == 3
        assert rates.attention_share(64, 2048, backward=True, deterministic=True) == 0.5
    assert [str(change) for change in machine.changes][:2] == [
        "nic 25 GB/s instead of 50 GB/s (--hw)",
        "matmul 0.6 instead of 0.77 (--hw)",
    ]
    twice = Machine.of("nic=25,nic=10", "a100")
    assert [change.usual for change in twice.changes] == ["25 GB/s"]
    assert (twice.target.name, twice.target.network, twice.name) == ("a100", 10e9, "a100*")


def test_each_constant_changes_what_it_names_and_nothing_else() -> None:
    for constant in CONSTANTS:
        value = "0.5" if not constant.unit else "7"
        machine = Machine.of(f"{constant.name}={value}")
        target = dataclasses.asdict(machine.target)
        usual = dataclasses.asdict(TARGETS["h100"])
        changed = {field for field, number in target.items() if number != usual[field]}
        assert changed == set(constant.target_fields), constant.name
        for rates, usual_rates in ((machine.fast, OPTIMISTIC), (machine.slow, SUSTAINED)):
            fields = {
                field.name
                for field in dataclasses.fields(rates)
                if getattr(rates, field.name) != getattr(usual_rates, field.name)
            }
            expected = set(constant.rate_fields)
            if constant.name == "flops":
                expected = {"matmul_table"}
            assert fields == expected, constant.name
        assert machine.recompiled == ((constant.name,) if constant.is_compiled else ())


def test_gpus_without_nvlink_send_over_pcie() -> None:
    machine = Machine.of("a100,nvlink=off")
    assert machine.target.nvlink == 32e9
    assert str(machine.changes[0]) == "nvlink off: 32 GB/s over PCIe instead of 300 GB/s (--hw)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("h1000", "--hw=h1000: there is no such device; did you mean 'h100'.* h200, a100, b200"),
        ("h100,nvlnk=3", "--hw=nvlnk: there is no such constant; did you mean 'nvlink'"),
        ("h100,a100", "--hw=h100,a100: one device at a time"),
        ("nic=fast", "--hw=nic=fast: expected GB/s .*between nodes"),
        ("nic=0", "--hw=nic=0: expected GB/s"),
        ("nic=off", "--hw=nic=off: expected GB/s"),
        ("nic=inf", "--hw=nic=inf: expected GB/s"),
        ("node=2.5", "--hw=node=2.5: expected GPUs"),
        ("matmul=1.2", "--hw=matmul=1.2: expected a share above 0 and up to 1"),
        ("none.json", "cannot read none.json: No such file"),
    ],
)
def test_nonsense_is_refused_in_a_line(words: str, message: str) -> None:
    with pytest.raises(LabError, match=message) as caught:
        Machine.of(words)
    assert "\n" not in str(caught.value)


def test_every_constant_of_a_target_says_where_it_is_from() -> None:
    for target in TARGETS.values():
        rows = list(constants_of(target))
        assert [name for name, _, _ in rows][:3] == ["nvlink", "nic", "node"]
        assert all(value and origin for _, value, origin in rows)
    assert machine_of("h200").target is TARGETS["h200"]
    with pytest.raises(LabError, match="no target 'h2000'; did you mean 'h200'"):
        machine_of("h2000")


# Replays.


def test_a_replay_at_the_usual_speeds_is_the_report_itself() -> None:
    report = saved(gather(1 << 28), NEGATE, MATMUL)
    assert Replay(report).on(Machine.of("h100")) == report
    assert compiled_on(report, Machine.of("h100")) is report


def test_links_change_what_crosses_them_and_the_limits_change_too() -> None:
    inside = saved(gather(1 << 28))
    across = saved(gather(1 << 28), nodes=8)
    slow = Machine.of("h100,nvlink=45,watts=350")
    assert inside.timeline and across.timeline
    replayed = Replay(inside).on(slow)
    assert replayed.timeline and replayed.sustained
    latency = 8 + 7 * 1.5
    assert replayed.timeline.step - latency == pytest.approx(10 * (inside.timeline.step - latency))
    (one,) = replayed.collectives
    assert one.duration == pytest.approx(replayed.timeline.step)
    assert one.exposed == pytest.approx(replayed.timeline.step)
    assert (replayed.watts, replayed.node) == (350, 8)
    # NVLink is no longer assumed to be slower than the network's port.
    assert Replay(across).on(Machine.of("h100,nvlink=200")).timeline == across.timeline
    slow_port = Replay(across).on(Machine.of("h100,nic=25")).timeline
    assert slow_port and slow_port.step > 1.9 * across.timeline.step
    assert [change.name for change in replayed.changes] == ["nvlink", "watts"]


def test_what_xla_reads_is_compiled_again() -> None:
    report = saved(NEGATE)
    for word, message in (
        ("h100,node=72", "--hw=node: XLA reads it, and .* was compiled for another value"),
        ("h200", "was compiled for h100, not for h200"),
    ):
        with pytest.raises(LabError, match=message):
            Replay(report).on(Machine.of(word))
    compiled = compiled_on(report, Machine.of("h100,node=72,nic=25"))
    again = Replay(compiled).on(Machine.of("h100,node=72"))
    assert again.node == 72 and [change.name for change in again.changes] == ["node"]
    with pytest.raises(LabError, match="was compiled with node 72 GPUs: give the same to --hw"):
        Replay(compiled).on(Machine.of("h100"))
    # The value that it was compiled with, given or not, is the same program.
    same = compiled_on(report, Machine.of("h100,node=8"))
    assert Replay(report).on(Machine.of("h100,node=8")).timeline == report.timeline
    assert Replay(same).on(Machine.of("h100")).timeline == report.timeline
    assert Replay(compiled).on(Machine.of("h100,node=72,watts=350")).watts == 350
    with pytest.raises(LabError, match="--hw=node: XLA reads it"):
        Replay(compiled).on(Machine.of("h100,node=8"))
    with pytest.raises(LabError, match="holds no program to replay"):
        Replay(dataclasses.replace(report, program=""))


def test_a_link_that_is_given_is_no_longer_uncertain() -> None:
    report = saved(gather(1 << 28))
    assert "most uncertain: NVLink at 0.7 to 0.78" in rates_words(report)
    assert "uncertain" not in rates_words(Replay(report).on(Machine.of("nvlink_share=0.8")))


def test_a_what_if_sorts_constants_by_their_effect() -> None:
    report = saved(gather(1 << 26), NEGATE)
    result = what_if(report, Machine.of("h100"))
    assert report.timeline and result.base_us == report.timeline.step
    widths = [effect.us(result.base_us) for effect in result.effects]
    assert widths == sorted(widths, reverse=True)
    names = [effect.constant.name for effect in result.effects if effect.us(result.base_us) > 0]
    assert names == ["elementwise", "nvlink_share", "nvlink_step_us", "start_us"]
    first = result.effects[0]
    assert (first.low_text, first.high_text, first.usual_text) == ("0.68", "0.9", "0.9")
    assert first.source == "measured to assumed" and first.high_us == result.base_us
    given = what_if(report, Machine.of("h100,elementwise=0.8"))
    assert given.effects[0].constant.name == "nvlink_share"


@pytest.fixture(scope="module")
def programs() -> dict[str, Replay]:
    """Programs that use the constants differently."""
    reports = {
        "matmuls": saved(MATMUL, gather(1 << 20)),
        "memory": saved(NEGATE, MATMUL),
        "inside": saved(gather(1 << 29), NEGATE),
        "across": saved(gather(1 << 28), NEGATE, nodes=8),
    }
    return {name: Replay(report) for name, report in reports.items()}


@pytest.mark.parametrize(
    ("name", "true"),
    [("nic_share", 0.3), ("nvlink_share", 0.4), ("matmul", 0.5), ("elementwise", 0.3)],
)
def test_a_planted_wrong_rate_is_found_by_name(
    name: str, true: float, programs: dict[str, Replay]
) -> None:
    """The planted rate is that of the hardware, of which the lab assumes another."""
    real = Machine.of(f"h100,{name}={true}")
    measured = {
        program: replay.timeline(real.target, real.fast).step
        for program, replay in programs.items()
    }
    first, second, *_ = suspects(measured, programs, Machine.of("h100"))
    assert first.constant.name == name
    assert first.value == pytest.approx(true, rel=0.02)
    assert first.error < 0.005 and second.error > 10 * first.error


def test_no_share_above_1_explains_a_step(programs: dict[str, Replay]) -> None:
    """Steps that are five times as fast as any share allows."""
    machine = Machine.of("h100")
    measured = {
        name: replay.timeline(machine.target, machine.fast).step / 5
        for name, replay in programs.items()
    }
    found = suspects(measured, programs, machine)
    shares = [suspect for suspect in found if not suspect.constant.unit]
    assert {suspect.constant.name for suspect in shares} >= {"matmul", "nvlink_share", "nic_share"}
    assert max(suspect.value for suspect in shares) == pytest.approx(1)
    assert all(suspect.value <= 1 + 1e-9 for suspect in shares)


# Profiles.


def profile(**changes: Any) -> Profile:
    points = (Point(1 << 20, 917_504.0, 20.0, 0.1), Point(1 << 24, 14_680_064.0, 60.0, 0.1))
    fields: dict[str, Any] = {
        "platform": "gpu",
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-29",
        "collectives": (
            Measured("all-gather", "tensor", 8, 1, Fit(20.0, 300e9, 0.01), points),
            Measured("all-gather", "data", 16, 2, Fit(50.0, 320e9, 0.01), points),
        ),
        "matmuls": (Matmul(1024, 5.0, 400e12, 0.4), Matmul(8192, 1500.0, 700e12, 0.7)),
    }
    return Profile(**{**fields, **changes})


def written(tmp_path: Path, one: Profile, **changes: Any) -> str:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**json.loads(one.to_json()), **changes}), encoding="utf-8")
    return str(file)


INSIDE = Collective(
    *("g", "all-gather", ("tensor",), 8, 1, ("bf16[8]",), "bf16", 1 << 30, 3e11, ()),
    *(False, Location(), True, 0),
)
ACROSS = dataclasses.replace(INSIDE, group=16, nodes=2)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert load_profile(written(tmp_path, profile())) == profile()


def test_a_plan_takes_a_profile(tmp_path: Path) -> None:
    machine = Machine.of(written(tmp_path, profile()))
    assert machine.target.name == "h100"
    assert machine.fast.matmul.value == machine.slow.matmul.value == 0.7
    assert [str(change) for change in machine.changes] == [
        "all-gather over NVLink 300 GB/s, 20 µs instead of assumed (profile.json)",
        "all-gather over network 40 GB/s, 50 µs instead of assumed (profile.json)",
        "matmul 0.7 instead of 0.77 (profile.json)",
    ]
    assert collective_us(INSIDE, machine.target, machine.fast) == pytest.approx(1e6 + 20)
    # Eight ports of 40 GB/s.
    assert collective_us(ACROSS, machine.target, machine.fast) == pytest.approx(
        1e6 * 3e11 / 320e9 + 50
    )
    half = dataclasses.replace(INSIDE, group=4)
    latency = collective_us(half, machine.target, machine.fast) - 1e6
    assert latency == pytest.approx(20 * (8 + 3 * 1.5) / (8 + 7 * 1.5))
    unmeasured = dataclasses.replace(INSIDE, kind="all-reduce")
    assert collective_us(unmeasured, machine.target, machine.fast) == collective_us(
        unmeasured, machine.target
    )
    replayed = Replay(saved(gather(1 << 28))).on(machine)
    assert "uncertain" not in rates_words(replayed)


@pytest.mark.parametrize(
    ("word", "inside", "across"),
    [
        # The rates that were assumed, of the new link; NVLink limits what crosses nodes, too.
        ("nvlink=off", 3e11 / (0.78 * 64e9), 3e11 / (0.78 * 64e9)),
        ("nvlink=900", 3e11 / (0.78 * 900e9), 3e11 / 320e9),
        ("nvlink_share=0.5", 3e11 / (0.5 * 450e9), 3e11 / (0.5 * 450e9)),
        ("nic=25", 1.0, 3e11 / (8 * 0.84 * 25e9)),
        ("nic_share=0.2", 1.0, 3e11 / (8 * 0.2 * 50e9)),
    ],
)
def test_a_link_that_is_given_after_a_profile_replaces_what_it_has_measured(
    word: str, inside: float, across: float, tmp_path: Path
) -> None:
    file = written(tmp_path, profile())
    machine = Machine.of(f"{file},{word}")
    for one, seconds in ((INSIDE, inside), (ACROSS, across)):
        us = collective_us(one, machine.target, machine.fast)
        assert us == pytest.approx(1e6 * seconds, rel=1e-3), one.nodes
    name = word.partition("=")[0]
    dropped = "all-gather over " + ("NVLink" if name.startswith("nvlink") else "network")
    names = [change.name for change in machine.changes]
    assert name in names and dropped not in names and len(names) == 3
    # What comes last wins.
    measured = Machine.of(f"{word},{file}")
    assert collective_us(INSIDE, measured.target, measured.fast) == pytest.approx(1e6 + 20)
    assert collective_us(ACROSS, measured.target, measured.fast) == pytest.approx(
        1e6 * 3e11 / 320e9 + 50
    )
    assert dropped in [change.name for change in measured.changes]


def test_a_latency_that_is_given_after_a_profile_replaces_the_measured_ones(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, profile())
    machine = Machine.of(f"{file},start_us=100")
    assert collective_us(INSIDE, machine.target, machine.fast) == pytest.approx(1e6 + 110.5)
    assert str(machine.changes[0]) == (
        "all-gather over NVLink 300 GB/s instead of assumed (profile.json)"
    )
    far = Machine.of(f"{file},nic_step_us=100")
    assert collective_us(INSIDE, far.target, far.fast) == pytest.approx(1e6 + 20)
    assert collective_us(ACROSS, far.target, far.fast) > 1e6 * 3e11 / 320e9 + 100


def test_a_device_that_is_named_is_not_that_of_a_profile(tmp_path: Path) -> None:
    file = written(tmp_path, profile())
    assert Machine.of(file).target.name == Machine.of(file, "h100").target.name == "h100"
    with pytest.raises(LabError, match="measured on NVIDIA H100 80GB HBM3, and the plan is for h2"):
        Machine.of(file, "h200")
    other = Machine.of(f"unchecked,{file}", "h200")
    assert other.target.name == "h200"
    assert collective_us(INSIDE, other.target, other.fast) == pytest.approx(1e6 + 20)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"device": "NVIDIA H200"}, "h100", "measured on NVIDIA H200, and the plan is for h100"),
        ({"platform": "cpu", "device": "cpu"}, "h100", "measured on a CPU, .*add unchecked"),
        ({"format": 0}, "", "format 0, and this version reads format 1: measure the profile"),
        ({"format": "2"}, "", "format 2, and"),
        ({"collectives": [{}]}, "", "is a damaged profile"),
        ({"strange": 1}, "", "is a damaged profile"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(
    change: dict[str, Any], words: str, message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, profile(), **change)
    with pytest.raises(LabError, match=message) as caught:
        Machine.of(f"{words},{file}")
    assert "\n" not in str(caught.value)
    if words:
        assert Machine.of(f"{words},unchecked,{file}").target.name == words


def test_other_files_are_no_profiles(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text, message in (("{", "it is not JSON"), ("[]", "is no profile: it names no format")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(LabError, match=message):
            load_profile(str(file))


def test_profiles_of_one_device_are_merged() -> None:
    comm = profile(matmuls=())
    matmul = profile(collectives=())
    assert matmul.merged(comm).collectives == comm.collectives
    with pytest.raises(LabError, match="choose another file"):
        matmul.merged(profile(device="NVIDIA H200"))


def test_a_new_measurement_replaces_its_own_older_one_and_no_other() -> None:
    """Collectives by kind, axis, group and nodes; matmuls by their size."""
    old = profile()
    tensor, data = old.collectives
    faster = dataclasses.replace(tensor, fit=Fit(10.0, 400e9, 0.01))
    reduced = dataclasses.replace(tensor, kind="all-reduce")
    new = profile(collectives=(faster, reduced), matmuls=(Matmul(8192, 1400.0, 750e12, 0.75),))
    merged = new.merged(old)
    assert merged.collectives == (data, faster, reduced)
    assert merged.matmuls == (old.matmuls[0], new.matmuls[0]) and merged.matmul_share() == 0.75
    assert merged.link_rates().keys() == {
        ("all-gather", "NVLink"), ("all-gather", "network"), ("all-reduce", "NVLink"),
    }  # fmt: skip
    assert new.merged(merged) == merged
    # Of as many devices over the same link the newer one counts.
    renamed = dataclasses.replace(tensor, axis="fsdp", fit=Fit(10.0, 100e9, 0.01))
    over_fsdp = profile(collectives=(renamed,)).merged(profile(collectives=(tensor,)))
    assert len(over_fsdp.collectives) == 2
    assert over_fsdp.link_rates()["all-gather", "NVLink"].bytes_per_s == 100e9


def test_a_change_survives_json() -> None:
    report = dataclasses.replace(saved(NEGATE), changes=(Change("nic", "50", "25", "--hw"),))
    assert Report.from_json(report.to_json()).changes == report.changes
