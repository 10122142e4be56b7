"""What somebody does who has never seen this project: installs the wheel elsewhere, and types what
the README says.

python tests/newcomer/newcomer.py # everything, in an environment made of nothing: minutes python
tests/newcomer/newcomer.py --venv=DIR --dependencies=.venv # what CI runs: the dependencies are
those of .venv

The sdist is built, the wheel from it, and the wheel installed into a fresh environment. All
commands run in an empty directory, with nothing of this checkout or of the tests in their
environment. With --pages the README's blocks and the notebook run there, too, by the tests that run
them (MESH_LM_READER is that environment's Python).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import first_hour

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "[aot,data]"
TOOLS = ("pytest", "nbclient", "ipykernel")
"""What the reader brings: a test runner for the README's experiment, and Jupyter."""
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "build", "runs", "*.egg-info", ".pytest_cache", ".ruff_cache"
)
SMALL = (
    "--train.steps=3",
    "--train.eval_sequences=32",
    "--train.sample_tokens=8",
    "--train.log_every=1",
)


class Newcomer:
    """An environment and an empty directory, and how long each thing took there."""

    def __init__(self, venv: Path, home: Path) -> None:
        self.venv, self.home, self.python = venv, home, venv / "bin" / "python"

    def does(self, what: str, *words: str, here: Path | None = None, says: str = "") -> str:
        """Runs a command; ends the script where it fails, where it does not say what it should, or
        where it speaks of an error."""
        return self._answer(what, words, here, 0, [says], {})

    def is_refused(self, what: str, *words: str, says: Sequence[str], **variables: str) -> str:
        """Runs a command; ends the script unless it has status 1 and says all that it should,
        without a traceback."""
        return self._answer(what, words, None, 1, says, variables)

    def _answer(
        self,
        what: str,
        words: Sequence[str],
        here: Path | None,
        status: int,
        says: Sequence[str],
        variables: dict[str, str],
    ) -> str:
        began = time.monotonic()
        kept = {
            name: os.environ[name]
            for name in ("LANG", "TMPDIR", "PIP_INDEX_URL", "PIP_CACHE_DIR", "SSL_CERT_FILE")
            if name in os.environ
        }
        environment = (
            kept
            | {"PATH": f"{self.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home)}
            | variables
        )
        done = subprocess.run(
            words, cwd=here or self.home, env=environment, capture_output=True, text=True
        )
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)
        said = done.stdout + done.stderr
        if (
            done.returncode != status
            or any(each not in said for each in says)
            or re.search(r"\bERROR\b|Traceback", said)
        ):
            expected = f"status {status} and {', '.join(map(repr, says))}"
            sys.exit(
                f"{' '.join(words)}: status {done.returncode}, expected {expected}\n{said[-6000:]}"
            )
        return said


def wheel(into: Path) -> Path:
    """The wheel, made from the sdist, of a copy of this checkout."""
    copy, python = into / "checkout", str(into / "builder" / "bin" / "python")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    subprocess.run([sys.executable, "-m", "venv", str(into / "builder")], check=True)
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
        "requires"
    ]
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requires], check=True
    )
    build = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    subprocess.run(
        [python, "-c", build, str(into)],
        cwd=copy,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (sdist,) = into.glob("*.tar.gz")
    pip = [
        python,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "-w", str(into), str(sdist)], check=True)
    (made,) = into.glob("*.whl")
    return made


def check_contents(made: Path) -> None:
    """The wheel has three packages, the configs inside one of them, and no module of the checkout's
    beside them."""
    with zipfile.ZipFile(made) as file:
        names = file.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"mesh_lm", "sharding_rules", "pallas_kernels"}, tops
    configs = {f"mesh_lm/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    wanted = {
        *configs,
        *(f"{top}/py.typed" for top in tops),
        "sharding_rules/lab/page.css",
        "mesh_lm/commands/main.py",
    }
    assert not (missing := wanted - {*names}), f"the wheel lacks {sorted(missing)}"


def install(made: Path, venv: Path, dependencies: str) -> Path:
    """A fresh environment with the wheel in it; its dependencies from the network, or those of
    another environment."""
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    if not dependencies:
        subprocess.run([*pip, f"{made}{EXTRAS}", *TOOLS], check=True)
        return venv
    subprocess.run([*pip, "--no-deps", str(made)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (theirs,) = Path(dependencies).resolve().glob("lib/python*/site-packages")
    # A plain path: an editable mesh_lm in there is not found by it, and the wheel comes first
    # anyway.
    (packages / "dependencies.pth").write_text(f"{theirs}\n", encoding="utf-8")
    return venv


def commands(reader: Newcomer) -> None:
    """The commands of the first minutes, in an empty directory."""
    found = reader.does(
        "mesh_lm is the wheel's", "python", "-c", "import mesh_lm; print(mesh_lm.__file__)"
    )
    assert str(reader.venv) in found, found
    reader.does("mesh-lm --version", "mesh-lm", "--version", says="mesh")
    reader.does("mesh-lm train", "mesh-lm", "train", "--config=gpt_tiny", *SMALL, says="step 3/3")
    reader.does(
        "mesh-lm train, again",
        "mesh-lm",
        "train",
        "gpt_tiny",
        *SMALL,
        says="already finished (step 3 of 3)",
    )
    reader.does(
        "mesh-lm generate",
        "mesh-lm",
        "generate",
        "--checkpoint=runs/gpt_tiny",
        "--prompt=def ",
        "--tokens=8",
        says="def ",
    )
    reader.does(
        "mesh-lm export",
        "mesh-lm",
        "export",
        "--checkpoint=runs/gpt_tiny",
        "--output=tiny-llama",
        says="to tiny-llama",
    )
    assert json.loads((reader.home / "tiny-llama" / "config.json").read_text(encoding="utf-8"))[
        "architectures"
    ] == ["LlamaForCausalLM"]
    reader.does("mesh-lm plan", "mesh-lm", "plan", "gpt_tiny", "--devices=8", says="fits")
    code = (
        "import mesh_lm\nprint(mesh_lm.load('runs/gpt_tiny').generate('def ', "
        "8))\nprint(mesh_lm.plan('gpt_tiny', devices=8).fits)"
    )
    (reader.home / "script.py").write_text(code, encoding="utf-8")
    reader.does("a script of three lines", "python", "script.py", says="True")


def experiment(reader: Newcomer) -> None:
    """The README's experiment, pasted into a file. CI runs it by tests/test_readme.py, with this
    environment's Python."""
    block = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )
    assert block is not None, "the README has no Python"
    (reader.home / "test_mine.py").write_text(block[1], encoding="utf-8")
    reader.does(
        "the README's experiment", "python", "-m", "pytest", "-q", "test_mine.py", says="1 passed"
    )


def pages(reader: Newcomer) -> None:
    """The README's commands and the notebook, by the tests of the pages."""
    tests = [
        "tests/docs/test_runnable.py",
        "tests/docs/test_notebook.py",
        "-m",
        "slow",
        "-k",
        "README or notebook",
        "-rs",
    ]
    environment = os.environ | {"MESH_LM_READER": str(reader.python)}
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment, check=True)
    print(f"{time.monotonic() - began:6.1f} s  the README's commands and the notebook", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venv", default="", help="keep the environment here; default: it is temporary"
    )
    parser.add_argument(
        "--dependencies",
        default="",
        help="an environment whose packages are the dependencies; default: pip installs them",
    )
    parser.add_argument(
        "--pages",
        action="store_true",
        help="also the README's commands and the notebook, by their tests",
    )
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        temporary = Path(name)
        (home := temporary / "home").mkdir()
        (built := temporary / "built").mkdir()
        made = wheel(built)
        check_contents(made)
        reader = Newcomer(
            install(made, Path(asked.venv or temporary / "venv").absolute(), asked.dependencies),
            home,
        )
        print(f"{time.monotonic() - began:6.1f} s  {made.name} is built and installed", flush=True)
        # .ci/run waits for it, and then runs the pages' tests in this environment
        (reader.venv / "ready").touch()
        commands(reader)
        first_hour.items(reader)
        if not asked.dependencies:
            experiment(reader)
        if asked.pages:
            pages(reader)
    print(f"{time.monotonic() - began:6.1f} s  in all", flush=True)


if __name__ == "__main__":
    main()
