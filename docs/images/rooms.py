"""Draws rooms.svg beside this file: the packages of mesh_lm in the layers that import-linter holds
(pyproject.toml), each with the first line of its docstring.

python docs/images/rooms.py
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("rooms.svg")
WIDTH = 940
ROW = 46
GAP = 8
ALONE = ("sharding_rules", "pallas_kernels")
"""Packages of their own, which import nothing of mesh_lm."""
STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933 }
.name { font-weight: 600 }
rect { fill: #eef3f8; stroke: #9fb3c8 }
.alone { fill: #f7f1e3; stroke: #cbb67c }
.arrow { stroke: #627d98; stroke-width: 2; fill: none }
"""


def layers() -> list[list[str]]:
    """Returns the rooms of mesh_lm, the highest layer first; a room imports only from layers below
    its own."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contract = linter["importlinter"]["contracts"][0]
    return [layer.split(" | ") for layer in contract["layers"]]


def summary(package: str) -> str:
    """Returns the first sentence of a package's or a module's docstring."""
    path = ROOT / package
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def box(name: str, path: str, x: float, y: float, width: float, style: str = "") -> list[str]:
    """Returns the SVG of one room."""
    characters = int((width - 24) / 6.6)
    text = textwrap.shorten(summary(path), characters, placeholder=" ...")
    return [
        f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{ROW}" rx="5"/>',
        f'<text class="name" x="{x + 12}" y="{y + 19}">{escape(name)}</text>',
        f'<text x="{x + 12}" y="{y + 36}">{escape(text)}</text>',
    ]


def picture() -> str:
    """Returns the SVG."""
    shapes: list[str] = []
    y = GAP
    rows = [[(name, f"mesh_lm/{name}", "") for name in layer] for layer in layers()]
    rows.append([(name, name, "alone") for name in ALONE])
    for row in rows:
        width = (WIDTH - 40 - GAP * len(row)) / len(row)
        for column, (name, path, style) in enumerate(row):
            shapes += box(name, path, 40 + column * (width + GAP), y, width, style)
        y += ROW + GAP
    arrow = f'<path class="arrow" d="M20 {GAP} V{y - GAP} l-5 -9 m5 9 l5 -9"/>'
    caption = f'<text transform="translate(14 {y / 2}) rotate(-90)">imports</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}">'
    return "\n".join([head, f"<style>{STYLE}</style>", arrow, caption, *shapes, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
