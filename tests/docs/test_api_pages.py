"""docs/api: each page shows every name that its package exports, from where it is defined."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "mesh_lm": "mesh_lm",
    "mesh_lm.config": "mesh_lm",
    "mesh_lm.inference": "mesh_lm",
    "sharding_rules": "sharding_rules",
    "sharding_rules.lab": "lab",
    "pallas_kernels": "pallas_kernels",
}
"""Package -> its page."""
LEFT_OUT = {"mesh_lm.__version__", "mesh_lm.config.as_dict", "mesh_lm.config.expert"}
"""A string, and what the trainer uses itself."""


def exported(package: str) -> set[str]:
    """The names in its __all__, or without one those of `from ... import NAME as NAME`."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    aliases = [
        alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return {alias.name for alias in aliases if alias.name == alias.asname}


def shown(page: str) -> list[str]:
    """The full names that a page asks mkdocstrings for."""
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text(encoding="utf-8")
    names = []
    for block in re.findall(r"^::: .*\n(?:(?: .*)?\n)*", text + "\n", re.M):
        name = block.split()[1]
        members = re.search(r"members: \[([^]]*)\]", block)
        # The root itself is shown unless its heading is off.
        if "show_root_heading: false" not in block:
            names.append(name)
        if members:
            names += [f"{name}.{member.strip()}" for member in members[1].split(",")]
    return names


@pytest.mark.parametrize("package", PAGES)
def test_every_exported_name_is_shown(package: str) -> None:
    page = PAGES[package]
    names = {name for name in exported(package) if f"{package}.{name}" not in LEFT_OUT}
    assert len(names) > 3
    for name in names:
        candidates = [path for path in shown(page) if path.rpartition(".")[2] == name]
        value = getattr(importlib.import_module(package), name)
        assert any(pkgutil.resolve_name(path) is value for path in candidates), (
            f"docs/api/{page}.md does not show {package}.{name}"
        )
