"""docs/closed_forms.md: its tables of tensor parallelism in two and more dimensions are the closed forms."""

import dataclasses
import math

import pytest

from mesh_lm.config import load
from tests.docs.test_closed_forms import PAGE, REMATS, gpt, run_counts, table
from tests.sharding_rules import closed_forms_tensor_2d as tensor_2d
from tests.sharding_rules.closed_forms import Decoder, Strategy, expected, total

COUNTS = (4, 8, 16, 32)


def layer_table() -> str:
    """What a layer of a microbatch sends over each of the two axes."""
    rows = []
    for remat in REMATS:
        found = expected(gpt(remat), Strategy("megatron_2d", tensor=4, tensor_y=4), 2, 4)
        of_layer = [t for t in found if t.part == "layer" and t.per in ("forward", "backward")]
        rows.append([remat, *(run_counts(t for t in of_layer if t.axes == (axis,)) for axis in ("tensor", "tensor_y"))])
    return table(["remat", "`tensor`", "`tensor_y`"], rows)


def cube(t: int) -> int:
    return round(t ** (1 / 3))


def sent(model: Decoder, strategy: Strategy) -> float:
    """MiB of a layer of one sequence, activations and norms."""
    return total(t for t in expected(model, strategy, 1, 1) if t.part == "layer" and t.per != "row") / model.layers / 2**20


def byte_table() -> str:
    """MiB that a device sends for a layer of one sequence in one dimension, and in two on the best mesh."""
    rows = []
    for name in ("gpt_175b", "llama3_8b"):
        model = dataclasses.replace(Decoder.of(load(f"configs/{name}.py").model), remat="save_names", recomputed=None, kept=0)
        for t in COUNTS:
            one = sent(model, Strategy("megatron", tensor=t))
            two = {y: sent(model, Strategy("megatron_2d", tensor=t // y, tensor_y=y)) for y in (2, 4, 8, 16) if t % y == 0 and y < t}
            y = min(two, key=lambda y: two[y])
            rows.append([f"`{name}`", str(t), f"{one:.1f}", f"{t // y} x {y}", f"{two[y]:.1f}", f"{100 * (two[y] / one - 1):+.0f} %"])
    return table(["config", "devices", "`megatron`", "tensor x tensor_y", "`megatron_2d`", "difference"], rows)


def dimension_table() -> str:
    """In h^2 elements per device: one and two dimensions, 2.5D and 3D, and the rules' own mesh with fsdp, each on its best mesh."""
    rows = []
    for t in (8, 64, 512):
        powers = [2**n for n in range(t.bit_length())]
        for r in (1 / 8, 1.0, 8.0):
            meshes = [(d, z, x, t // (d * z * x)) for d in powers for z in powers for x in powers if t % (d * z * x) == 0]
            best = min(meshes, key=lambda mesh: tensor_2d.with_fsdp(r, *mesh))
            sent = (
                tensor_2d.one(r, t),
                min(tensor_2d.two(r, t // y, y) for y in powers),
                min(tensor_2d.two_and_a_half(r, q, t // q**2) for q in powers if q > 1 and t % q**2 == 0),
                tensor_2d.three(r, cube(t)),
                tensor_2d.with_fsdp(r, *best),
            )
            named = [f"{axis} {n}" for axis, n in zip(("data", "fsdp", "tensor", "tensor_y"), best, strict=True) if n > 1]
            rows.append([str(t), f"{r:g}", *(f"{elements / t:.2f}" for elements in sent), ", ".join(named)])
    return table(["devices", "tokens / h", "1D", "2D", "2.5D", "3D", "rules", "their mesh"], rows)


def crossover_table() -> str:
    """The tokens / h from which on 2.5D and 3D send less than the better of one and two dimensions."""
    rows = []
    for t in (8, 64, 512):
        powers = [2**n for n in range(t.bit_length())]
        slope = min(8 * (t - 1), *(tensor_2d.two(1, t // y, y) for y in powers))
        meshes = [(q, t // q**2) for q in powers if q > 1 and t % q**2 == 0]
        at = [[[tensor_2d.two_and_a_half(r, *mesh) for r in (0, 1)] for mesh in meshes], [[tensor_2d.three(r, cube(t)) for r in (0, 1)]]]
        # Each is a line in r: it crosses that of fewer dimensions, which goes through zero, if it is less steep.
        found = [[first / (slope - second + first) for first, second in lines if second - first < slope] for lines in at]
        rows.append([str(t), *(f"{min(ratios):.2f}" if ratios else "never" for ratios in found)])
    return table(["devices", "2.5D", "3D"], rows)


@pytest.mark.parametrize("render", [layer_table, byte_table, dimension_table, crossover_table])
def test_tables_are_the_forms(render) -> None:
    assert render() in PAGE, f"docs/closed_forms.md must have this table:\n{render()}"


def test_claims_of_the_page() -> None:
    assert all(tensor_2d.two(1, t // 2, 2) < tensor_2d.one(1, t) for t in COUNTS[1:])
    assert tensor_2d.two(1, 2, 2) > tensor_2d.one(1, 4)
    assert math.isclose(tensor_2d.two(1, 4, 2) / tensor_2d.one(1, 8), 49 / 56)
