"""Latency and bandwidth from times that are known."""

import pytest

from mesh_lm.measure.fit import fitted

SIZES = [2.0**n for n in range(12, 27, 2)]


def test_exact_times_give_their_latency_and_bandwidth() -> None:
    fit = fitted(SIZES, [25 + size / 3e3 for size in SIZES])
    assert (fit.latency_us, fit.bytes_per_s) == pytest.approx((25, 3e9))
    assert fit.error == pytest.approx(0, abs=1e-9)


def test_noise_of_ten_percent_moves_the_fit_by_less() -> None:
    noise = [1.1, 0.9, 1.05, 0.95, 1.1, 0.92, 1.08, 0.9]
    times = [factor * (25 + size / 3e3) for factor, size in zip(noise, SIZES, strict=True)]
    fit = fitted(SIZES, times)
    assert fit.bytes_per_s == pytest.approx(3e9, rel=0.1)
    assert fit.latency_us == pytest.approx(25, rel=0.1)
    assert 0.05 < fit.error < 0.1


def test_a_latency_is_never_negative() -> None:
    fit = fitted([1e6, 2e6], [100, 300])
    assert fit.latency_us == 0
    assert 1e6 * 1e6 / fit.bytes_per_s == pytest.approx(110, rel=0.2)


def test_times_that_do_not_grow_still_give_a_bandwidth() -> None:
    fit = fitted([1e3, 1e6], [100, 50])
    assert fit.latency_us >= 0 and 0 < fit.bytes_per_s < 1e12


@pytest.mark.parametrize(("sizes", "times"), [([8, 8], [1, 2]), ([8], [1]), ([8, 16], [0, 1])])
def test_too_little_to_fit_is_refused(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        fitted(sizes, times)
