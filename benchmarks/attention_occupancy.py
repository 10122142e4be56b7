"""How well the attention kernels' grids fill an H100, for the local shapes of every config:
predicted from the number of their blocks.

Nothing runs. Each config is taken on its published number of devices. The efficiency is the share
of the SMs' time in which they have work, if the blocks take as long as the keys or queries that
they visit. The backward owns tiles of keys; it has a block for each kv head or, where those are
few, for each query head.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from plan_table import FOR_CPUS, PUBLISHED
from record import ROOT, Row, markdown

from mesh_lm.config import load
from pallas_kernels.attention.occupancy import by_query_head, of_keys, of_queries

NOTE = (
    "B sequences of S tokens, N query heads and K kv heads on one device. forward: and the "
    "gradient of queries; keys: the gradients of keys and values by kv head; split: by query head; "
    "chosen: the grid that the five-matmul backward takes of these two."
)


def local_shape(config: Any, devices: int) -> tuple[int, int, int, int]:
    """(sequences, tokens, query heads, kv heads) of one call of attention on one of the devices."""
    mesh, model = config.mesh.resolve(devices), config.model
    B = config.train.global_batch // (config.train.microbatches * mesh.data * mesh.fsdp)
    N, K = model.n_heads // mesh.tensor, max(1, model.kv_heads // mesh.tensor)
    return B, model.seq_len, N, K


def row_of(name: str, shape: tuple[int, int, int, int], width: int, window: int | None) -> Row:
    """A row of the table: blocks and efficiencies of each grid. width: of the heads of queries and
    of values together."""
    B, S, N, K = shape
    queries = of_queries(B, S, S, N, K, width=width, window=window)
    kv_tiles, query_tiles = (
        of_keys(B, S, S, N, K, split=split, width=width, window=window) for split in (False, True)
    )
    split = by_query_head(B, N, K, S)
    return {
        "name": name, "B": B, "S": S, "N": N, "K": K, "forward_blocks": queries.blocks,
        "forward": round(queries.efficiency, 3),
        "keys_blocks": kv_tiles.blocks, "keys": round(kv_tiles.efficiency, 3),
        "split_blocks": query_tiles.blocks,
        "split": round(query_tiles.efficiency, 3),
        "chosen": round((query_tiles if split else kv_tiles).efficiency, 3),
    }  # fmt: skip


def rows() -> list[Row]:
    """One row for each config and width of its windows; those for CPUs are left out."""
    table = []
    for path in sorted(Path(ROOT, "configs").glob("[!_]*.py")):
        if path.stem not in FOR_CPUS:
            config: Any = load(str(path))
            shape = local_shape(config, PUBLISHED[path.stem])
            for window in config.model.windows():
                name = path.stem + (f", window {window}" if window else "")
                table.append(row_of(name, shape, 2 * config.model.d_head, window))
    return table


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sys.stdout.write(markdown("Occupancy", rows(), NOTE) + "\n")


if __name__ == "__main__":
    main()
