"""From the fast to the slow end of a prediction, and the margin of what fits."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

import lab_report
import pytest

from mesh_lm.commands.plan_options import Plan
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.planning.run_cost import report_facts
from sharding_rules.lab.rates import NETWORK, OPTIMISTIC, SUSTAINED, Rate
from sharding_rules.lab.report import Band, Report, Timeline
from sharding_rules.lab.summary import durations, headline, rates_words, verdict

GIB = lab_report.GIB


@pytest.mark.parametrize(
    ("fast", "slow", "words"),
    [
        (3.58e6, 4.02e6, "3.58 to 4.02 s"),
        (3.58e6, 3.58e6, "3.58 s"),
        (900e3, 1.1e6, "900 ms to 1.1 s"),
        (51e3, 56e3, "51 to 56 ms"),
    ],
)
def test_a_band_has_its_unit_once(fast: float, slow: float, words: str) -> None:
    assert durations(Band(fast, slow)) == words


def step(us: float, **waits: float) -> Timeline:
    return Timeline(us, us, 0, 0, (), waits=waits)


def test_a_measured_rate_may_be_faster_than_the_optimistic_one() -> None:
    report = lab_report.report(sustained=step(5e6))
    assert report.step_band == Band(5e6, report.timeline.step)  # pyright: ignore
    assert "step 5 to 6.01 s (predicted)" in headline(report)
    assert lab_report.report(sustained=None).step_band == Band(*2 * (report.timeline.step,))  # pyright: ignore
    assert lab_report.report(timeline=None).step_band is None


def test_the_link_that_decides_is_the_one_that_compute_waits_for() -> None:
    report = lab_report.report()
    inside, across = (
        next(c for c in report.collectives if (c.nodes > 1) is far) for far in (False, True)
    )
    across = dataclasses.replace(across, name="far")
    report = dataclasses.replace(report, collectives=(inside, across))

    def decides(**waits: float) -> str:
        named = {across.name if name == "far" else inside.name: us for name, us in waits.items()}
        return dataclasses.replace(report, sustained=step(9e6, **named)).deciding_link

    assert decides(near=3e6, far=4e6) == "network" and decides(near=4e6, far=3e6) == "NVLink"
    assert decides(near=4e4, far=4e4) == ""
    text = rates_words(dataclasses.replace(report, sustained=step(9e6, far=1e6)))
    assert text.endswith("most uncertain: the network at 0.65 to 0.84 of its peak (assumed)")
    assert rates_words(dataclasses.replace(report, sustained=None)) == ""


def test_a_report_fits_with_a_margin_that_is_wider_for_another_jax() -> None:
    peak = lab_report.report().peak_bytes

    def with_memory(share: float, jax: str = version("jax")) -> Report:
        return lab_report.report(hbm=int(share * peak), versions={"jax": jax})

    assert with_memory(1.051).fits and with_memory(1.101, "0.1").fits
    assert not with_memory(1.049).fits and not with_memory(1.099, "0.1").fits
    assert verdict(with_memory(1.04)) == (
        "too tight, 0.33 GiB free, less than 0.41 GiB (5% of the peak)"
    )
    assert verdict(with_memory(0.5)).startswith("does not fit, 4.15 GiB too much")
    assert verdict(with_memory(1.5)).startswith("fits, ")


def test_what_a_whole_run_takes_and_costs() -> None:
    config = load("gpt_175b")
    report = lab_report.report(sustained=step(12.02e6), timeline=step(6.01e6))
    # 1,536 sequences of 2,048 tokens in 6.01 s on 1,024 GPUs.
    assert dict(report_facts(config, report)) == {
        "speed": "262,000 to 523,000 tokens/s, 256 to 511 on each GPU"
    }
    # 10^12 / 523,400 / 86,400 = 22.1 days; 24 x 1,024 x 22.1 = 543,000 GPU hours of 0.7 kWh.
    assert dict(report_facts(config, report, 1e12, 2.5))["1 T tokens"] == (
        "22.1 to 44.2 days, 543,000 to 1.09 M GPU hours, 1.36 M to 2.72 M at 2.5 each, "
        "380 to 761 MWh at 700 W each"
    )
    tokens = config.train.steps * config.tokens_per_step
    (*_, whole) = report_facts(config, report, gpu_hour=2)
    assert whole == [*report_facts(config, report, tokens, 2)][-1]
    assert list(report_facts(config, lab_report.report(timeline=None), 1e12)) == []


@pytest.mark.parametrize("change", [{"tokens": -1.0}, {"gpu_hour": float("nan")}])
def test_a_run_of_less_than_nothing_is_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}=.* at least 0"):
        Plan("screen", **change)  # pyright: ignore


def test_every_rate_says_where_it_is_from() -> None:
    for rates in (OPTIMISTIC, SUSTAINED):
        values = [getattr(rates, field.name) for field in dataclasses.fields(rates)]
        found = [value for value in values if isinstance(value, Rate)]
        found += rates.memory.values()
        for attention in rates.attention.values():
            found += [*attention.forward.values(), *attention.backward.values()]
            found.append(attention.deterministic)
        assert len(found) > 10
        for rate in found:
            assert rate.origin and (rate.source != "measured" or "202" in rate.origin)
    assert str(NETWORK) == "the network at 0.65 to 0.84 of its peak"
