"""docs/what_has_run.md: its numbers are those of the newest results, and its platforms those of the
project."""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "what_has_run.md").read_text(encoding="utf-8").split())
RESULTS = ROOT / "benchmarks" / "results"


def tables(name: str) -> dict[str, list[dict]]:
    data = json.loads(max(RESULTS.glob(f"{name}_*_h200-*.json")).read_text(encoding="utf-8"))
    return {title: table["rows"] for title, table in data["tables"].items()}


def test_what_one_gpu_did() -> None:
    attention = {
        (row["mask"], row["way"]): row for row in tables("gpu_suite")["Headline, compared"]
    }
    forward, backward = attention["causal", "fwd"], attention["causal", "bwd"]
    assert f"{forward['ours']:.0f} TFLOP/s forward and {backward['ours']:.0f} backward" in PAGE
    assert f"cuDNN reached {forward['cudnn']:.0f} and {backward['cudnn']:.0f}" in PAGE
    (step,) = [
        row for row in tables("gpu_truth")["Predicted and measured"] if row["target"] == "h200"
    ]
    measured, predicted = step["measured_step_s"], step["predicted_step_s"]
    assert (
        f"{step['config']} took {measured:.2f} s; without a GPU {predicted:.2f} s had been "
        "predicted"
    ) in PAGE


def test_the_platforms_are_those_of_the_project() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "classifiers"
    ]
    supported = {text.rpartition(" ")[2] for text in classifiers if "Python :: 3." in text}
    assert set(re.findall(r"Linux, Python (3\.\d+)", PAGE)) == supported
    for pins in re.findall(r"\.\./(constraints/[\w.]+\.txt)", PAGE):
        jax = re.search(r"^jax==(.*)$", (ROOT / pins).read_text(encoding="utf-8"), re.M)
        assert jax and f"jax {jax[1]} ([tested versions](../{pins}))" in PAGE


def test_what_another_jax_changes() -> None:
    newest = max(RESULTS.glob("jax_versions_*_h100.json"))
    rows = json.loads(newest.read_text(encoding="utf-8"))["tables"]["Side by side"]["rows"]
    old, new = "0.10.2", "0.12.0.1"
    changes: dict[str, list[float]] = {}
    for row in rows:
        figure = "sent" if row["figure"].startswith("sent") else row["figure"]
        changes.setdefault(figure, []).append(100 * (row[f"jax {new}"] / row[f"jax {old}"] - 1))
    memory, step = changes["peak_gib"], changes["step_s"]
    assert max(map(abs, changes["sent"])) < 1e-9 and len(step) == 5
    assert f"results/{newest.stem}.md" in PAGE and f"under jax {old} and {new}" in PAGE
    assert (
        "the programs of both versions send the same bytes" in PAGE
        and "the peak memory is between" in PAGE
    )
    assert f"between {-min(memory):.1f} % lower and {max(memory):.1f} % higher" in PAGE
    assert f"between {-min(step):.1f} % shorter and {max(step):.1f} % longer" in PAGE


def test_several_gpus_are_denied_until_one_run_has_used_them() -> None:
    assert bool(list(RESULTS.glob("multi_gpu_*.json"))) != ("No run has used several GPUs." in PAGE)


def test_the_readme_says_the_same() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        "[What has run where](docs/what_has_run.md)" in readme
        and "Linux with Python 3.11 to 3.13" in readme
    )
