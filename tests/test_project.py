"""The files around the code: what is installed, what is promised of versions, and that templates
and metadata can be read."""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mesh_lm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))


def test_the_version_is_the_projects() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    # else it is read from the package
    assert mesh_lm.__version__ == citation["version"] == PROJECT.get("version", mesh_lm.__version__)
    assert f"## {mesh_lm.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_types_are_announced() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["package-data"]
    for package in ("mesh_lm", "sharding_rules", "pallas_kernels"):
        assert (ROOT / package / "py.typed").exists() and "py.typed" in data[package]


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_tested_versions_are_allowed(path: Path) -> None:
    """Each base dependency is pinned, to a version that pyproject.toml allows."""
    pins = [
        Requirement(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    for required in map(Requirement, PROJECT["dependencies"]):
        version = versions[canonicalize_name(required.name)]
        assert version in required.specifier, f"{path.name}: {required} does not allow {version}"


def test_an_old_python_is_answered_by_requires_python() -> None:
    """Without the marker, an old pip first reports that these packages have no version for that
    Python."""
    oldest = PROJECT["requires-python"].removeprefix(">=")
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["aot"]):
        assert str(Requirement(line).marker) == f'python_version >= "{oldest}"', line


def test_a_constraints_file_for_each_python_that_is_tested() -> None:
    classifiers = {
        text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text
    }
    assert {
        path.stem.removeprefix("python").partition("-")[0] for path in CONSTRAINTS
    } < classifiers


def test_every_library_that_the_packages_import_is_declared() -> None:
    """A library that only comes along with another one is gone when that one drops it."""
    ours = {"mesh_lm", "sharding_rules", "pallas_kernels", "configs"}
    with_jax = {"jaxlib"}  # jax's other half, of the version that jax requires
    declared = {*PROJECT["dependencies"]}.union(*PROJECT["optional-dependencies"].values())
    names = {canonicalize_name(Requirement(line).name) for line in declared}
    distributions = importlib.metadata.packages_distributions()
    imported = {
        name
        for package in ours
        for path in (ROOT / package).rglob("*.py")
        for name in _imported_libraries(path)
    }
    for library in sorted(imported - ours - with_jax):
        providers = {canonicalize_name(name) for name in distributions.get(library, [library])}
        assert providers & names, (
            f"{library} is imported, and pyproject.toml declares none of "
            f"{', '.join(sorted(providers))}"
        )


def _imported_libraries(path: Path) -> set[str]:
    """The top-level packages that a file imports, deferred imports included, without the standard
    library."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def test_templates_and_hooks_can_be_read() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][
        0
    ]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"ruff-check", "ruff-format", "pyright"}
    words = next(hook["entry"] for hook in hooks if hook["id"] == "words")
    assert (ROOT / words.split()[-1]).exists()
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert path.name == "config.yml" or all(
            part["attributes"]["label"] for part in form["body"]
        )
