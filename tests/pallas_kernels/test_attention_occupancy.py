"""The estimate of how a grid fills the SMs, against schedules and tiles counted by hand."""

import numpy as np
import pytest

from pallas_kernels.attention.occupancy import (
    CACHE,
    SMS,
    by_query_head,
    of_keys,
    of_queries,
    schedule,
    section_of_keys,
    section_of_queries,
    tile_costs,
)


def visited(S: int, T: int, offset: int, window: int | None) -> np.ndarray:
    """Whether a tile of 128 queries causally sees some key of a block of 128: bool [tiles, blocks]."""
    distance = np.arange(T)[None] - np.arange(S)[:, None] - offset
    visible = (distance <= 0) & (distance > -(window or S + T))
    padded = np.pad(visible, ((0, -S % 128), (0, -T % 128)))
    tiles = padded.reshape(-(-S // 128), 128, -(-T // 128), 128)
    return np.asarray(tiles.any((1, 3)))


@pytest.mark.parametrize(
    ("S", "T", "offset", "window"),
    [(1024, 1024, 0, None), (1000, 1000, 0, 300), (384, 1024, 640, None)],
)
def test_a_tile_costs_the_blocks_that_it_sees_and_one(
    S: int, T: int, offset: int, window: int | None
) -> None:
    blocks = visited(S, T, offset, window)
    assert tile_costs(S, T, q_offset=offset, window=window) == tuple(blocks.sum(1)[::-1] + 1)
    assert tile_costs(S, T, q_offset=offset, window=window, rows_are_keys=True) == tuple(
        blocks.sum(0) + 1
    )
    assert tile_costs(S, T, causal=False) == (blocks.shape[1] + 1,) * blocks.shape[0]


def test_a_block_goes_to_the_first_sm_that_is_free() -> None:
    assert schedule((3, 2, 1), 1, sms=2).efficiency == 1  # 3 | 2 1
    assert schedule((1, 2, 3), 1, sms=2).efficiency == 6 / 8  # 1 3 | 2
    two_waves = schedule((5,), 133)
    assert two_waves.blocks == 133
    assert two_waves.waves == 133 / SMS
    assert two_waves.efficiency == pytest.approx(133 / (2 * SMS))


def test_a_grid_too_long_to_follow_is_as_good_as_its_last_wave() -> None:
    costs = tuple(range(64, 0, -1))
    estimated = schedule(costs, 700)
    exact = schedule(costs, 600)
    assert estimated.efficiency == pytest.approx(exact.efficiency, abs=5e-3)


def test_tensor_parallel_llama_leaves_no_sm_idle_by_query_head() -> None:
    """64 blocks of keys for 132 SMs, of a Llama 3 70B's layer on one of eight devices: the first
    causal tile is most of the work."""
    S = 8192
    N = 8
    K = 1
    assert by_query_head(1, N, K, S)
    assert of_keys(1, S, S, N, K, split=False).efficiency < 0.25
    assert of_queries(1, S, S, N, K).efficiency > 0.99
    assert of_keys(1, S, S, N, K, split=True).efficiency > 0.99


SPLIT = {
    (1, 16, 16, 1024): False,  # each query head has its own keys
    (1, 8, 1, 8192): True,
    (2, 8, 1, 8192): True,
    (1, 32, 8, 8192): False,  # 512 blocks, the longest first
    (1, 8, 1, 65_536): False,
}


@pytest.mark.parametrize("shape", SPLIT)
def test_heads_are_split_only_where_they_share_keys_and_blocks_are_few(
    shape: tuple[int, int, int, int],
) -> None:
    assert by_query_head(*shape) == SPLIT[shape]


def test_a_section_is_as_many_heads_as_fit_the_cache() -> None:
    head_bytes = 2 * 8192 * 256  # of a head's keys and values
    assert CACHE // head_bytes == 8
    assert section_of_queries(8192, 16, 16, 256) == 8
    assert section_of_queries(8192, 12, 12, 256) == 6  # a divisor
    assert section_of_queries(8192, 64, 8, 256) == 64
    assert section_of_queries(131_072, 16, 16, 256) == 1
    assert section_of_keys(8192, 64, 8, 256, split=True) == 8
    assert section_of_keys(8192, 64, 8, 256, split=False) == 1


def test_a_section_starts_with_its_longest_tiles() -> None:
    """Three heads with tiles of 3 and 1 on two SMs: together 3 1 1 1 and 3 3; one after the other,
    the last 3 begins late."""
    assert schedule((3, 1), 3, section=3, sms=2).efficiency == 1
    assert schedule((3, 1), 3, section=1, sms=2).efficiency == 12 / 14
