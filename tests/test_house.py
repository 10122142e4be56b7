"""The house rules: imports point one way, and each outside library is imported in one place only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import text_files

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "pallas_kernels": set(),
    "sharding_rules": set(),
    "mesh_lm": {"pallas_kernels", "sharding_rules"},
    "configs": {"mesh_lm", "sharding_rules"},
    "train": {"mesh_lm", "sharding_rules"},
}
ONE_DOOR = {
    "safetensors": "mesh_lm/huggingface/files.py",
    "tyro": "mesh_lm/commands/options.py",
    "grain": "mesh_lm/data/loader.py",
    "tensorboardX": "mesh_lm/report/writer.py",
    "tokenizers": "mesh_lm/data/tokenizer/hugging_face.py",
    "sentencepiece": "mesh_lm/data/tokenizer/sentence_piece.py",
    "tiktoken": "mesh_lm/data/tokenizer/ranks.py",
    "pyarrow": "mesh_lm/data/formats.py",
    "zstandard": "mesh_lm/data/compression.py",
    "lm_eval": "mesh_lm/inference/harness.py",
    "wandb": "mesh_lm/report/weights_and_biases.py",
}
FILES = sorted(
    p for top in MAY_IMPORT for p in (*ROOT.glob(f"{top}/**/*.py"), *ROOT.glob(f"{top}.py"))
)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, top-level package) of every import in a file, deferred ones included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in names:
            yield getattr(node, "lineno", 0), name.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    home = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for line, top in imports(path):
        assert top not in MAY_IMPORT or top == home or top in MAY_IMPORT[home], (
            f"{path}:{line}: {home} must not import {top}"
        )
        assert top not in ONE_DOOR or str(path.relative_to(ROOT)) == ONE_DOOR[top], (
            f"{path}:{line}: only {ONE_DOOR[top]} imports {top}"
        )


def test_each_door_is_used() -> None:
    for package, path in ONE_DOOR.items():
        assert package in {top for _, top in imports(ROOT / path)}, (
            f"{path} does not import {package}"
        )


def test_text_is_utf_8_in_any_locale() -> None:
    """ruff's PLW1514 finds only those calls whose object it knows to be a path."""
    calls = (
        (path, call)
        for path in text_files.FILES
        for call in text_files.unspecified(path.read_text(encoding="utf-8"))
    )
    found = [f"{path.relative_to(ROOT)}:{call.lineno}" for path, call in calls]
    assert not found, (
        'give encoding="utf-8", or where the encoding of the locale is meant, encoding="locale"'
    )


def test_text_without_an_encoding_is_found() -> None:
    text = [
        "open(a)",
        "open(a, 'w')",
        "a.open()",
        "a.open('r+')",
        "a.read_text()",
        "a.read_text(errors='replace')",
        "a.write_text(b)",
    ]
    text += ["os.fdopen(1, 'w')", "tempfile.NamedTemporaryFile('w')", "io.TextIOWrapper(a)"]
    other = [
        "open(a, 'rb')",
        "open(a, mode='wb')",
        "a.open('xb')",
        "a.read_text(encoding='utf-8')",
        "a.read_text('utf-8')",
        "os.open(a, b)",
    ]
    other += [
        "a.write_text(b, 'utf-8')",
        "open(a, **b)",
        "gzip.open(a)",
        "tempfile.NamedTemporaryFile()",
        "os.fdopen(1, 'wb')",
    ]
    assert [line for line in text + other if list(text_files.unspecified(line))] == text


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sharding_rules", ["mesh_lm", "pallas_kernels", "flax", "optax"]),
        ("import pallas_kernels", ["mesh_lm", "sharding_rules", "flax", "optax"]),
        (
            "import configs.gpt_tiny, configs.gpt_175b",
            ["tyro", "grain", "tensorboardX", "flax", "optax"],
        ),
        (
            "import mesh_lm.model.decoder, mesh_lm.training.step, mesh_lm.checkpoint, "
            "mesh_lm.training.check, mesh_lm.data.sequences, mesh_lm.planning.program",
            ["tyro", "grain", "tensorboardX", "tokenizers", "matplotlib"],
        ),
        # Slow, because only CI's slow part has torch installed.
        pytest.param("import mesh_lm.training.loop", ["torch"], marks=pytest.mark.slow),
    ],
)
def test_what_an_import_brings(statement: str, absent: list[str]) -> None:
    code = f"{statement}; import sys; print([m for m in {absent!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
