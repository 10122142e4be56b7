"""The static part of a call of the Hopper kernels, its tiles, and the refs that a kernel works on.

Shape suffixes of the kernels: B batch, S query sequence and T key sequence (padded to complete
tiles), N heads, K kv heads, H head dim of queries and keys, V that of values; Q query rows and C
keys of one tile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

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
FLOOR = -1e30
"""Below every logit, but finite: a maximum that starts here never computes inf - inf, even in rows
that see no key."""


class Registers(NamedTuple):
    """Registers of a thread by the role of its warpgroup.

    A block starts with equally many for each thread, and `setmaxnreg` moves those that the loading
    warpgroup does not need to the computing ones (FlashAttention-3, arXiv 2407.08608, section 3.1).
    An SM has 65,536: 512 for each of a warpgroup's 128 threads.
    """

    compute: int
    load: int


WARPGROUP = 64
"""Rows of one wgmma; a tile has this many for each warpgroup that computes."""
COMPUTING = 2
"""Warpgroups that compute; one more warpgroup loads."""
REGISTERS = Registers(compute=240, load=24)
"""2 x 240 + 24 = 504 of the 512 registers."""
FORWARD_REGISTERS = {2: REGISTERS, 3: Registers(compute=160, load=32)}
"""Registers by the number of warpgroups that compute: 3 x 160 + 32 = 512."""
SHARED_MEMORY = 232_448 - 2048
"""Bytes for matrices: the limit of a block, minus room for vectors and barriers."""
GRID = ("_attention_batch", "_attention_section", "_attention_tile", "_attention_head")
THREAD = "_attention_warpgroup"
"""Names that no mesh uses: for a mesh axis of the same name, jax silently returns the device's
index instead of the block's."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a kernel: 128 rows stay in place while blocks of columns pass."""

    block: int
    """Columns of a block."""
    stages: int
    """The most blocks that are in shared memory together."""

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
    """Tile sizes of the forward pass, and variants of its schedule (see `forward.py`).

    Only a GPU can rank the variants: benchmarks/results/gpu_suite_2026-11-26_h200-jax-0.11.2.md has
    their rates. 3 warpgroups with named barriers alone had 1.20 times the default's for heads of 64
    without a mask; with heads of 128 no variant was more than 4 % faster.
    """

    overlapped: bool = True
    """PV of a block is in flight during the softmax of the next one."""
    warpgroups: int = COMPUTING
    """Warpgroups that compute: 2, or 3 with fewer registers each."""
    height: int = WARPGROUP
    """Rows of a warpgroup."""
    named_barriers: bool = False
    """Warpgroups take turns by the named barriers of a block instead of barriers in shared
    memory."""
    automatic_barriers: bool = True
    """Pallas adds a barrier of the warpgroup to each copy and each access to shared memory."""

    def __post_init__(self) -> None:
        if self.block not in (64, 128, 192, 256) or self.stages < 2:
            raise ValueError(
                "a block has 64, 128, 192 or 256 columns and there are at least 2 stages, not "
                f"{self.block} and {self.stages}"
            )
        heights = (WARPGROUP, 2 * WARPGROUP)
        if self.warpgroups not in FORWARD_REGISTERS or self.height not in heights:
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
    def registers(self) -> Registers:
        """Registers of a thread by the role of its warpgroup."""
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
    """None: traced; then the limits of each tile come in a table."""
    segments: bool = False
    sinks: bool = False
    block_mask: BlockMask | None = None
    deterministic: bool = False
    """Every sum has a fixed order."""
    unrounded: bool = False
    """The backward pass returns its sums in fp32."""

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
        """Factor from (capped) dot products to logits to the base 2.

        Probabilities are then `exp2`, one instruction.
        """
        return (self.scale if self.softcap is None else self.softcap) * LOG2E

    def band(self, offset: int | Array | None = None) -> Band:
        """The band with queries as rows. `offset` is used if the spec has none."""
        if offset is None:
            offset = self.q_offset or 0
        return Band.of(self.causal, self.window, offset)

    def masks(self, length: int, block: int) -> bool:
        """Whether some block of columns may need a mask."""
        return self.causal or self.segments or length % block != 0

    def flops(self, B: int, N: int, width: int) -> int:
        """FLOPs of the matmuls over all visible pairs.

        width: the sum of the dimensions that they contract or produce for each pair.
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
        """The share of the SMs' time in which a grid gives them work.

        None with a block mask, whose tiles differ in ways that are not counted.

        Args:
          width: the sum of the widths of the heads of queries and of values.
          keys: the tiles are of keys instead of queries.
          split: a tile of keys has a block for each query head.
        """
        if self.block_mask is not None:
            return None
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "q_offset": self.q_offset,
            "width": width,
        }
        if keys:
            return occupancy.of_keys(B, self.S, self.T, N, K, split=split, **options).efficiency
        return occupancy.of_queries(B, self.S, self.T, N, K, **options).efficiency


OPTIONAL_INPUTS = ("table", "counts", "blocks", "offset", "q_ids", "k_ids", "sinks")
"""Inputs that a kernel may have besides the matrices."""


class Refs(dict[str, Any]):
    """A kernel's refs by name; None for inputs and scratch that this call does not have."""

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
) -> Refs:
    """Returns the outputs, by name, of `body(refs)` as a Mosaic GPU kernel.

    Args:
      inputs, scratch: by name; those that are None are left out.
      name, flops, occupancy: metadata.
      moved: metadata, in bytes; None: each input and output once.
      grid: batch, heads, tiles.
      section: heads that go through their tiles together (see `occupancy.py`).
      computing: warpgroups besides the one that loads.
      automatic_barriers: as in `ForwardTiles`.
    """
    absent = dict.fromkeys((*OPTIONAL_INPUTS, *scratch))
    inputs = present(inputs)
    scratch = present(scratch)
    if moved is None:
        moved = sum(x.size * x.dtype.itemsize for x in (*inputs.values(), *out.values()))

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
    )
    with cost_metadata(name, flops=flops, bytes_accessed=moved, occupancy=occupancy):
        return Refs(zip(out, call(*inputs.values()), strict=True))


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {name: x for name, x in values.items() if x is not None}


def in_sections(grid: tuple[int, int, int], section: int) -> tuple[int, int, int, int]:
    """The sizes of the axes of GRID, the last the fastest, from those of (batch, heads, tiles)."""
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
    """An accumulator of a wgmma, fp32 in registers."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def matrix(rows: int, columns: int, dtype: Any, copies: tuple[int, ...] = ()) -> Any:
    """Shared memory for tiles [rows, columns], in a layout that both wgmma and TMA use.

    It is divided into tiles of 8 rows, the widest of which have 128 bytes, the widest swizzle.
    """
    itemsize = jnp.dtype(dtype).itemsize
    tile_columns = 128 // itemsize
    if columns % tile_columns:
        tile_columns = 64 // itemsize
    return swizzled(rows, columns, dtype, tile_columns, copies)


def swizzled(
    rows: int, columns: int, dtype: Any, tile_columns: int, copies: tuple[int, ...]
) -> Any:
    """Shared memory as of `matrix`, in tiles of 8 rows and `tile_columns`, each swizzled."""
    transforms = (
        plgpu.TilingTransform((8, tile_columns)),
        plgpu.SwizzleTransform(jnp.dtype(dtype).itemsize * tile_columns),
    )
    return plgpu.SMEM((*copies, rows, columns), dtype, transforms=transforms)


def transposed(ref: Any) -> Any:
    """A view of shared memory as its transpose."""
    return ref.transpose((1, 0))


def kernel_band(spec: Spec, refs: Refs) -> Band:
    """The band inside the kernel, with queries as rows."""
    return spec.band(refs.offset[0] if spec.traced else None)


def tile_walk(
    tiles: Tiles,
    band: Band,
    n_rows: int,
    n_columns: int,
    refs: Refs,
    batch: Any,
    head: Any,
    tile: Any,
    *,
    pad_is_harmless: bool = False,
) -> Walk:
    """The blocks of a tile, inside the kernel.

    They are read from the lists of a block mask or from the table, or computed from the band.

    Args:
      n_rows, n_columns: lengths without padding, of queries and keys or vice versa.
      pad_is_harmless: as for `limits`.
    """
    if refs.blocks is not None:
        row = head if refs.blocks.shape[0] > 1 else 0
        n_full = refs.counts[row, tile, 0]
        n = refs.counts[row, tile, 1]
        return Walk(n_full, n, lambda step: refs.blocks[row, tile, step])
    if refs.table is not None:
        row = batch if refs.table.shape[0] > 1 else 0
        return Walk.of(Limits(*(refs.table[row, tile, i] for i in range(4))))
    first = tile * tiles.rows
    last = jnp.minimum(first + tiles.rows, n_rows) - 1
    return Walk.of(
        limits(band, first, last, n_columns, tiles.block, pad_is_harmless=pad_is_harmless)
    )


def vector(ref: Any, axis: int) -> Array:
    """A vector in shared memory, loaded into registers for `axis` of a tile in wgmma's layout.

    axis: 0, one value for each row, or 1, one for each column.
    """
    return compat.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis))


def spread(x: Array, shape: tuple[int, ...], axis: int = 0) -> Array:
    """A vector along `axis`, broadcast to the shape of a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def opaque(x: Any) -> Any:
    """Returns x, hidden from the compiler.

    If the compiler knew that x is the same in every step, it would keep values derived from it in
    registers. From an operand's address it derives a descriptor for every 16 columns, two registers
    each: 64 registers for heads of 256.
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
    """Mask of the invisible elements of a tile that starts at (row, column) of the band.

    None: all are visible.

    n_columns: the number of columns, beyond which nothing is visible; 0: no limit.
    """
    # One-dimensional, and hidden from the compiler, which would keep their differences in
    # registers, one for each element of the tile.
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    column_layout = plgpu.Layout.WGMMA.reduce(0)
    r = opaque(plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=row_layout))
    c = spread(plgpu.broadcasted_iota(jnp.int32, shape[1:], 0, layout=column_layout), shape, 1)
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
