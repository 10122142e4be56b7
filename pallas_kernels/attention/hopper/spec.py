"""The static part of a call of the Hopper kernels, their tiles, and the refs that a kernel works
on.

Shape suffixes of the kernels: B batch, S query sequence and T key sequence (padded to complete
tiles), N heads, K kv heads, H head dim of queries and keys, V that of values; Q query rows and C
keys of one tile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention import occupancy
from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.cost import cost_metadata, visible_pairs
from pallas_kernels.attention.hopper.walk import Band, Limits, Walk, limits

LOG2E = math.log2(math.e)
# Below every logit, but finite: a maximum that starts here never computes inf - inf, even in rows
# that see no key.
FLOOR = -1e30
WARPGROUP = 64
"""Rows of one wgmma; a tile has this many for each warpgroup that computes."""
COMPUTING = 2
"""Warpgroups that compute; one more warpgroup loads."""
REGISTERS = 240, 24
"""Registers of a thread that computes and of one that loads: 2 x 240 + 24 of the 512 for each of
128 threads."""
FORWARD_REGISTERS = {2: REGISTERS, 3: (160, 32)}
"""The same by the number of warpgroups that compute: 3 x 160 + 32."""
SHARED_MEMORY = 232_448 - 2048
"""Bytes for matrices: the limit of a block, minus room for vectors and barriers."""
GRID = "_attention_batch", "_attention_section", "_attention_tile", "_attention_head"
THREAD = "_attention_warpgroup"
"""Names that no mesh uses: for a mesh axis of the same name, jax silently returns the device's
index instead of the block's."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a kernel: 128 rows stay in place while blocks of `block` columns pass, at most
    `stages` of them in shared memory.
    """

    block: int
    stages: int

    def __post_init__(self) -> None:
        if self.block not in (64, 128) or self.stages < 2:
            raise ValueError(
                f"a block has 64 or 128 columns and there are at least 2 stages, not {self.block} "
                f"and {self.stages}"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return WARPGROUP * COMPUTING


@dataclasses.dataclass(frozen=True)
class ForwardTiles(Tiles):
    """Tile sizes of the forward pass, and variants of its schedule (see `forward.py`), which only a
    GPU can rank.
    """

    overlapped: bool = True
    """Whether PV of a block is in flight during the softmax of the next one."""
    warpgroups: int = COMPUTING
    """Warpgroups that compute: 2, or 3 with fewer registers each."""
    height: int = WARPGROUP
    """Rows of each of them."""
    named_barriers: bool = False
    """Whether warpgroups take turns by the named barriers of a block instead of barriers in shared
    memory."""
    automatic_barriers: bool = True
    """Whether Pallas adds a barrier of the warpgroup to each copy and each access to shared
    memory."""

    def __post_init__(self) -> None:
        if self.block not in (64, 128, 192, 256) or self.stages < 2:
            raise ValueError(
                "a block has 64, 128, 192 or 256 columns and there are at least 2 stages, not "
                f"{self.block} and {self.stages}"
            )
        if self.warpgroups not in FORWARD_REGISTERS or self.height not in (
            WARPGROUP,
            2 * WARPGROUP,
        ):
            raise ValueError(
                f"2 or 3 warpgroups have 64 or 128 rows each, not {self.warpgroups} and "
                f"{self.height}"
            )
        if not self.overlapped and (self.warpgroups != 2 or self.named_barriers):
            raise ValueError(
                "warpgroups that alternate are 2, without named barriers: set overlapped=True for "
                "others"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * self.height

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes and of one that loads."""
        return FORWARD_REGISTERS[self.warpgroups]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call without its arrays and tiles. Lengths are those without padding."""

    S: int
    T: int
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    q_offset: int | None = 0
    """None: traced; then the limits come in a table."""
    segments: bool = False
    sinks: bool = False
    block_mask: BlockMask | None = None
    deterministic: bool = False
    """Whether every sum has a fixed order."""
    unrounded: bool = False
    """Whether the backward pass returns its sums in fp32."""

    @property
    def tabled(self) -> bool:
        """Whether the limits of a tile are data."""
        return self.segments or self.traced

    @property
    def traced(self) -> bool:
        """Whether the band's offset is known at run time only."""
        return self.causal and self.q_offset is None

    @property
    def capped(self) -> float:
        """Factor of the raw dot product before the soft cap; 1 without one."""
        return 1.0 if self.softcap is None else self.scale / self.softcap

    @property
    def to_log2(self) -> float:
        """Factor from (capped) dot products to logits to the base 2, so that probabilities are
        `exp2`, one instruction.
        """
        return (self.scale if self.softcap is None else self.softcap) * LOG2E

    def band(self, offset: int | Array | None = None) -> Band:
        """The band with queries as rows. `offset` is used if the spec has none."""
        return Band.of(self.causal, self.window, (self.q_offset or 0) if offset is None else offset)

    def masks(self, length: int, block: int) -> bool:
        """Whether some block of columns may need a mask."""
        return self.causal or self.segments or length % block != 0

    def flops(self, B: int, N: int, width: int) -> int:
        """FLOPs of the matmuls over all visible pairs. width: the sum of the dimensions that they
        contract or produce per pair.
        """
        pairs = visible_pairs(
            self.S,
            self.T,
            causal=self.causal,
            window=self.window,
            q_offset=self.q_offset,
            block_mask=self.block_mask,
        )
        return int(2 * B * N * pairs * width)

    def occupancy(
        self, B: int, N: int, K: int, width: int, *, keys: bool = False, split: bool = False
    ) -> float | None:
        """The share of the SMs' time in which a grid of tiles of queries, or of keys, gives them
        work.

        width: the sum of the widths of the heads of queries and of values. split: a tile of keys
        has a block for each query head. None with a block mask, whose tiles differ in ways that are
        not counted.
        """
        if self.block_mask is not None:
            return None
        how: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "q_offset": self.q_offset,
            "width": width,
        }
        if keys:
            return occupancy.of_keys(B, self.S, self.T, N, K, split=split, **how).efficiency
        return occupancy.of_queries(B, self.S, self.T, N, K, **how).efficiency


SIDES = "table", "counts", "blocks", "offset", "q_ids", "k_ids", "sinks"
"""Inputs that a kernel may have besides the matrices."""


class Refs(dict[str, Any]):
    """A kernel's refs by name; None for those that this call does not have."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no ref {name!r}; there are {', '.join(self)}")
        return self[name]


def launch(
    body: Any,
    inputs: Mapping[str, Array | None],
    out: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    name: str,
    flops: int,
    grid: tuple[int, int, int],
    section: int,
    occupancy: float | None = None,
    moved: int | None = None,
    computing: int = COMPUTING,
    automatic_barriers: bool = True,
    **how: Any,
) -> Refs:
    """The outputs, by name, of `body(refs)` as a Mosaic GPU kernel. Inputs and scratch that are
    None are left out.

    grid: batch, heads, tiles; section: heads that go through their tiles together (see
    `occupancy.py`); flops, occupancy and moved: metadata, the last in bytes, None: each input and
    output once; computing: warpgroups besides the one that loads; automatic_barriers: as in
    `ForwardTiles`.
    """
    absent = dict.fromkeys((*SIDES, *scratch))
    inputs, scratch = (
        {key: x for key, x in some.items() if x is not None} for some in (inputs, scratch)
    )
    each_once = sum(x.size * x.dtype.itemsize for x in (*inputs.values(), *out.values()))

    def entry(*refs: Any) -> None:
        body(Refs(absent | dict(zip((*inputs, *out, *scratch), refs, strict=True))))

    params = plgpu.CompilerParams(
        approx_math=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=not automatic_barriers,
    )
    call = plgpu.kernel(
        entry,
        out_type=list(out.values()),
        scratch_types=list(scratch.values()),  # pyright: ignore[reportArgumentType]
        compiler_params=params,
        grid=in_sections(grid, section),
        grid_names=GRID,
        num_threads=computing + 1,
        thread_name=THREAD,
        kernel_name=name,
        **how,
    )
    with cost_metadata(name, flops=flops, bytes_accessed=moved or each_once, occupancy=occupancy):
        return Refs(zip(out, call(*inputs.values()), strict=True))


def in_sections(grid: tuple[int, int, int], section: int) -> tuple[int, int, int, int]:
    """The sizes of the axes of GRID, of which the last is the fastest, from (batch, heads,
    tiles).
    """
    batch, heads, tiles = grid
    return batch, heads // section, tiles, section


def block_position() -> tuple[Any, Any, Any]:
    """(batch element, head, tile) of this block."""
    batch, section, tile, member = (lax.axis_index(name) for name in GRID)
    return batch, section * lax.axis_size(GRID[-1]) + member, tile


def warpgroup() -> Any:
    """The index of this warpgroup in its block."""
    return lax.axis_index(THREAD)


def accumulator(columns: int, rows: int = WARPGROUP) -> Any:
    """An accumulator in registers."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def matrix(rows: int, columns: int, dtype: Any, copies: tuple[int, ...] = ()) -> Any:
    """Shared memory for tiles [rows, columns], in a layout that both wgmma and TMA use."""
    size = jnp.dtype(dtype).itemsize
    wide = 128 // size if columns % (128 // size) == 0 else 64 // size
    transforms = (plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(size * wide))
    return plgpu.SMEM((*copies, rows, columns), dtype, transforms=transforms)


def transposed(ref: Any) -> Any:
    """A view of shared memory as its transpose."""
    return ref.transpose((1, 0))


def band_of(spec: Spec, refs: Refs) -> Band:
    """The band inside the kernel, with queries as rows."""
    return spec.band(refs.offset[0] if spec.traced else None)


def walk_of(
    tiles: Tiles,
    band: Band,
    n_rows: int,
    n_columns: int,
    refs: Refs,
    batch: Any,
    head: Any,
    tile: Any,
    **how: bool,
) -> Walk:
    """The blocks of a tile, inside the kernel: read from the lists of a block mask or from the
    table, or computed.

    n_rows, n_columns: lengths without padding, of queries and keys or vice versa. how: as for
    `limits`.
    """
    if refs.blocks is not None:
        row = head if refs.blocks.shape[0] > 1 else 0
        return Walk(
            refs.counts[row, tile, 0],
            refs.counts[row, tile, 1],
            lambda step: refs.blocks[row, tile, step],
        )
    if refs.table is not None:
        row = batch if refs.table.shape[0] > 1 else 0
        return Walk.of(Limits(*(refs.table[row, tile, i] for i in range(4))))
    first = tile * tiles.rows
    return Walk.of(
        limits(
            band, first, jnp.minimum(first + tiles.rows, n_rows) - 1, n_columns, tiles.block, **how
        )
    )


def vector(ref: Any, axis: int) -> Array:
    """A vector in shared memory, loaded into registers for `axis` of a tile in wgmma's layout: 0
    one value a row, 1 one a column.
    """
    return compat.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis))


def spread(x: Array, shape: tuple[int, ...], axis: int = 0) -> Array:
    """A vector along `axis`, broadcast to the shape of a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def opaque(x: Any) -> Any:
    """x, hidden from the compiler: if it knew that x is the same in every step, it would keep
    values derived from it in registers.

    From an operand's address it derives a descriptor for every 16 columns, two registers each: 64
    registers for heads of 256.
    """
    return lax.optimization_barrier(x)


def hidden(
    band: Band,
    shape: tuple[int, int],
    row: Any,
    column: Any,
    row_ids: Array | None,
    column_ids: Array | None,
    n_columns: int,
) -> Array | None:
    """Mask of the invisible elements of a tile that starts at (row, column) of the band; None: all
    are visible.

    n_columns: the number of columns, beyond which nothing is visible; 0: no limit.
    """
    # One-dimensional, and hidden from the compiler, which would keep their differences in
    # registers, one for each element of the tile.
    r = opaque(plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)))
    c = spread(
        plgpu.broadcasted_iota(jnp.int32, shape[1:], 0, layout=plgpu.Layout.WGMMA.reduce(0)),
        shape,
        1,
    )
    shift = row - column
    conditions = []
    if band.high is not None:
        conditions.append(c > spread(r + (band.high + shift), shape, 0))
    if band.low is not None:
        conditions.append(c < spread(r + (band.low + shift), shape, 0))
    if n_columns % shape[1]:
        conditions.append(c >= n_columns - column)
    if row_ids is not None and column_ids is not None:
        conditions.append(spread(row_ids, shape, 0) != spread(column_ids, shape, 1))
    mask = None
    for condition in conditions:
        mask = condition if mask is None else mask | condition
    return mask
