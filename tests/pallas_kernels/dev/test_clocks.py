"""The estimate of a step's clocks, against numbers worked out by hand for one warpgroup, and counts
of instructions in machine code."""

import pytest

from pallas_kernels.attention import tuning
from pallas_kernels.dev import clocks

COMPILE_BUDGET = 0


def test_a_wgmma_takes_the_clocks_of_its_flops_and_of_its_operands() -> None:
    """64 x 64 x 128: eight instructions of 32 clocks, which read 2 KiB of either operand each."""
    both, one = clocks.wgmma(64, 64, 128), clocks.wgmma(64, 128, 64, registers=True)
    assert (both.tensor, both.shared, both.instructions) == (256, 8 * (16 + 16), 8)
    assert (one.tensor, one.shared, one.instructions) == (256, 4 * 32, 4)


def test_the_backward_of_heads_of_128_is_bound_by_tensor_cores_if_registers_add_to_global_memory() -> (
    None
):
    """For a warpgroup, S and dP 256 each, dV and dK 128 each, dQ 256; dS stored 64; Q and dO 128;
    through memory, dQ twice 128 more."""
    red, tma = (clocks.fused(128, 128, 64, add=add) for add in ("red", "tma"))
    assert (red.tensor, red.shared, red.exponentials) == (2 * 1280, 2 * 1216, 2 * 256)
    assert red.bound == ("tensor", 2560) and red.utilisation >= 0.85
    assert tma.bound == ("shared", 2 * 1472) and tma.utilisation == pytest.approx(1280 / 1472)
    assert red.issue == pytest.approx(2 * 445, rel=0.05) and tma.issue == pytest.approx(
        2 * 504, rel=0.05
    )


def test_the_instructions_of_the_forward_are_about_those_of_its_code() -> None:
    assert clocks.forward(128, 128, 128).issue == pytest.approx(2 * 400, rel=0.05)


def test_a_short_step_is_bound_by_its_chain() -> None:
    one = clocks.Clocks("a kernel", tensor=100, shared=90, exponentials=80, issue=70, chain=200)
    assert one.bound == ("chain", 200) and one.utilisation == 0.5


def test_every_entry_has_a_line_that_says_what_binds() -> None:
    """None of them leaves the tensor cores idle for more than a sixth of the time, by this
    estimate."""
    found = [one for row in tuning.entries() for one in clocks.of_entry(row)]
    assert len(list(clocks.lines())) == 2 + len(found) >= 2 + 3 * len(tuning.entries())
    assert all(0.83 <= one.utilisation <= 1 for one in found)
    [wide] = [line for line in clocks.lines() if line.startswith("| 192, 128 | forward |")]
    assert wide.endswith("| shared | 0.95 |")


def test_heads_too_wide_for_both_sums_leave_one_out() -> None:
    six, five = (
        clocks.fused(256, 256, 64, computes_dv=computes_dv) for computes_dv in (False, True)
    )
    assert five.tensor - six.tensor == 2 * clocks.wgmma(64, 256, 64).tensor
