"""The table of rates in docs/lab.md, from the rates themselves: tests/docs/made.py writes it into
the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sharding_rules.lab.rates import OPTIMISTIC, SUSTAINED, Rate, Rates
from tests.docs.markdown import table

_TENSOR_CORES = "the tensor cores' FLOP/s"
_MEMORY = "the memory's bytes/s"


def rates() -> str:
    """Returns a row for each rate: of which peak it is a share, and both ends with their source."""
    rows = []
    for fast, slow in zip(_cells(OPTIMISTIC), _cells(SUSTAINED), strict=True):
        rows.append([*fast, slow[-1]])
    return table(["rate", "share of", "optimistic", "sustained"], rows)


def _cells(ends: Rates) -> Iterator[tuple[str, str, str]]:
    """Yields the name of each rate, the peak that it is a share of or its unit, and its text."""
    yield "large matmuls", _TENSOR_CORES, _words(ends.matmul)
    yield "matmuls in XLA's table", "the speeds in the table", _words(ends.matmul_table)
    for dtype, rate in ends.memory.items():
        yield f"kernels without matmuls, {dtype}", _MEMORY, _words(rate)
    for head_dim in SUSTAINED.attention:
        nearest = min(ends.attention, key=lambda width: abs(width - head_dim))
        attention = ends.attention[nearest]
        name = f"attention, head dim {head_dim}"
        yield f"{name}, forward", _TENSOR_CORES, _by_keys(attention.forward)
        yield f"{name}, backward", _TENSOR_CORES, _by_keys(attention.backward)
        deterministic = _words(attention.deterministic)
        yield f"{name}, deterministic backward", _TENSOR_CORES, deterministic
    yield "grouped matmuls", _TENSOR_CORES, _words(ends.grouped)
    yield "each group of a grouped matmul", "(µs)", _words(ends.group_us)
    yield "collectives over NVLink", "NVLink's bytes/s", _words(ends.nvlink)
    yield "collectives over the network", "the port's bytes/s", _words(ends.network)
    yield "copies between GPU and host", "PCIe's bytes/s", _words(ends.pcie)
    yield "shortest kernel", "(µs)", _words(ends.kernel_us)
    yield "start of a collective", "(µs)", _words(ends.start_us)
    yield "the same between nodes, added", "(µs)", _words(ends.between_us)
    yield "a step of a collective inside a node", "(µs)", _words(ends.nvlink_step_us)
    yield "a step of a collective between nodes", "(µs)", _words(ends.network_step_us)


def _words(rate: Rate) -> str:
    """Returns 0.69 (measured 2026-11-26)."""
    day = re.search(r"\d{4}-\d\d-\d\d", rate.origin)
    source = f"measured {day[0]}" if rate.source == "measured" and day else rate.source
    return f"{rate.value:.2g} ({source})"


def _by_keys(by_keys: Mapping[int, Rate]) -> str:
    """Returns the rates by the number of keys; one alone is that of any number."""
    if len(by_keys) == 1:
        (rate,) = by_keys.values()
        return _words(rate)
    return "; ".join(f"{n:,} keys: {_words(rate)}" for n, rate in by_keys.items())


TABLES = {"rates": rates}
