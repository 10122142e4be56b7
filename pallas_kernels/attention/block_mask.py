"""Block-sparse attention: a static pattern of blocks of queries and keys that see each other.

A block that is not visible costs nothing. `fixed` and `strided` are Sparse Transformers' patterns
(Child et al. 2019, arXiv 1904.10509), `bigbird` is BigBird's (Zaheer et al. 2020, arXiv
2007.14062), all with blocks instead of positions, as in their authors' kernels. The other masks of
a call (causal, window, segments) apply as well.
"""

import dataclasses
from functools import cached_property

import numpy as np

MULTIPLE = 64
"""Block sizes are multiples of this, the smallest efficient tile of a GPU's matrix units."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A static pattern.

    It compares and hashes by value, so that it can be a static argument of `jax.jit`. Raises
    ValueError if `visible` has another type or rank, or if `size` is not a multiple of 64.
    """

    visible: np.ndarray
    """bool [N or 1, ceil(S / size), ceil(T / size)]: by query head (1: the same for all), block of
    queries, block of keys. Blocks count from query 0 and key 0 of the call, whatever its
    `q_offset`."""
    size: int
    """Positions in a block of queries or keys; a multiple of 64."""

    def __post_init__(self) -> None:
        visible = np.array(self.visible, order="C")
        if visible.dtype != bool or visible.ndim != 3 or 0 in visible.shape:
            raise ValueError(
                "BlockMask.visible must be bool [heads or 1, blocks of queries, blocks of keys], "
                f"got {visible.dtype} {list(visible.shape)}"
            )
        is_integer = isinstance(self.size, int | np.integer)
        if not is_integer or self.size < MULTIPLE or self.size % MULTIPLE:
            raise ValueError(f"BlockMask.size must be a multiple of {MULTIPLE}, got {self.size}")
        visible.flags.writeable = False
        object.__setattr__(self, "visible", visible)
        object.__setattr__(self, "size", int(self.size))

    @cached_property
    def _key(self) -> tuple:
        return self.size, self.visible.shape, self.visible.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def faults(self, S: int, T: int, N: int) -> list[str]:
        """The faults of the pattern for S queries, T keys and N query heads; empty: none."""
        needed_rows = -(-S // self.size)
        needed_columns = -(-T // self.size)
        heads, rows, columns = self.visible.shape
        faults = []
        if (rows, columns) != (needed_rows, needed_columns):
            faults.append(
                f"block_mask has {rows} x {columns} blocks of {self.size}; {S} queries and {T} "
                f"keys need {needed_rows} x {needed_columns}"
            )
        if heads not in (1, N):
            faults.append(f"block_mask has {heads} heads; it must have 1 (for all) or {N}")
        return faults

    def dense(self, S: int, T: int) -> np.ndarray:
        """The pattern by position, bool [N or 1, S, T]."""
        row_blocks = np.arange(S) // self.size
        key_blocks = np.arange(T) // self.size
        return self.visible[:, row_blocks[:, None], key_blocks]

    @classmethod
    def fixed(
        cls,
        S: int,
        T: int | None = None,
        *,
        size: int = 128,
        stride: int,
        summary: int = 1,
        heads: int = 1,
    ) -> "BlockMask":
        """Each query sees its own stretch of `stride` blocks, and some blocks of every stretch.

        These are the last `summary` blocks. With several heads, head i uses the i-th last group of
        `summary` blocks instead, modulo the number of groups.
        """
        row, key = _blocks(S, T, size)
        if not 1 <= summary <= stride:
            raise ValueError(
                f"BlockMask.fixed: summary must be 1 to stride={stride} blocks, got {summary}"
            )
        _require_at_least(1, heads=heads)
        n_groups = stride // summary
        group = np.arange(heads)[:, None, None] % n_groups
        first = stride - summary * (1 + group)
        in_summary = (key % stride >= first) & (key % stride < first + summary)
        return cls((row // stride == key // stride) | in_summary, size)

    @classmethod
    def strided(cls, S: int, T: int | None = None, *, size: int = 128, stride: int) -> "BlockMask":
        """Each query sees the blocks up to `stride` away, and those at multiples of `stride`."""
        row, key = _blocks(S, T, size)
        _require_at_least(1, stride=stride)
        distance = np.abs(row - key)
        return cls((distance <= stride) | (distance % stride == 0), size)

    @classmethod
    def sliding(cls, S: int, T: int | None = None, *, size: int = 128, blocks: int) -> "BlockMask":
        """Each query sees the keys of its own block and of `blocks - 1` blocks on either side."""
        row, key = _blocks(S, T, size)
        _require_at_least(1, blocks=blocks)
        return cls(np.abs(row - key) < blocks, size)

    @classmethod
    def bigbird(
        cls,
        S: int,
        T: int | None = None,
        *,
        size: int = 128,
        global_blocks: int = 1,
        window_blocks: int = 3,
        random_blocks: int = 3,
        causal: bool = False,
        heads: int = 1,
        seed: int = 0,
    ) -> "BlockMask":
        """The first `global_blocks` see and are seen by all; a query sees near and random blocks.

        Args:
          window_blocks: the blocks around a query's own that it sees; odd, its own in the middle.
          random_blocks: drawn without repetition from the blocks that a query does not see already;
            all of these if they are fewer.
          causal: draw from earlier blocks only, for causal calls, which would hide about half of
            the random blocks.
          heads: the number of heads, each with its own draw.
          seed: for the draws.
        """
        row, key = _blocks(S, T, size)
        _require_at_least(0, global_blocks=global_blocks, random_blocks=random_blocks)
        if window_blocks % 2 != 1:
            raise ValueError(f"BlockMask.bigbird: window_blocks must be odd, got {window_blocks}")
        _require_at_least(1, heads=heads)
        is_global = (row < global_blocks) | (key < global_blocks)
        always_visible = is_global | (np.abs(row - key) <= window_blocks // 2)

        # A query draws the blocks with the smallest random numbers.
        drawable = ~always_visible & (key <= row) if causal else ~always_visible
        drawable = np.broadcast_to(drawable, (heads, *always_visible.shape[1:]))
        numbers = np.random.default_rng(seed).random(drawable.shape)
        rank = np.where(drawable, numbers, np.inf).argsort(-1).argsort(-1)
        return cls(always_visible | ((rank < random_blocks) & drawable), size)


def _blocks(S: int, T: int | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the blocks: of queries [1, ceil(S / size), 1], of keys [1, 1, ceil(T / size)]."""
    if T is None:
        T = S
    _require_at_least(1, S=S, T=T, size=size)
    return np.arange(-(-S // size))[None, :, None], np.arange(-(-T // size))[None, None]


def _require_at_least(minimum: int, **values: int) -> None:
    """Raises ValueError for a value less than `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"BlockMask: got {name}={value}, which must be at least {minimum}")
