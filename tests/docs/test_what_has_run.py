"""docs/what_has_run.md: its numbers are those of the newest results, and its platforms those of the project."""

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
    attention = {(row["mask"], row["way"]): row for row in tables("gpu_suite")["Headline, compared"]}
    forward, backward = attention["causal", "fwd"], attention["causal", "bwd"]
    assert f"{forward['ours']:.0f} TFLOP/s forward and {backward['ours']:.0f} backward" in PAGE
    assert f"cuDNN reached {forward['cudnn']:.0f} and {backward['cudnn']:.0f}" in PAGE
    (step,) = [row for row in tables("gpu_truth")["Predicted and measured"] if row["target"] == "h200"]
    measured, predicted = step["measured_step_s"], step["predicted_step_s"]
    assert f"{step['config']} took {measured:.2f} s; without a GPU {predicted:.2f} s had been predicted" in PAGE


def test_the_platforms_are_those_of_the_project() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    supported = {text.rpartition(" ")[2] for text in classifiers if "Python :: 3." in text}
    assert set(re.findall(r"Linux, Python (3\.\d+)", PAGE)) == supported
    for pins in re.findall(r"\.\./(constraints/[\w.]+\.txt)", PAGE):
        jax = re.search(r"^jax==(.*)$", (ROOT / pins).read_text(encoding="utf-8"), re.M)
        assert jax and f"jax {jax[1]} ([tested versions](../{pins}))" in PAGE


def test_several_gpus_are_denied_until_one_run_has_used_them() -> None:
    assert bool(list(RESULTS.glob("multi_gpu_*.json"))) != ("No run has used several GPUs." in PAGE)


def test_the_readme_says_the_same() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "[What has run where](docs/what_has_run.md)" in readme and "Linux with Python 3.11 to 3.13" in readme
