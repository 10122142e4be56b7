"""`mesh-lm`: its list of commands, its errors, and the packages that it does not import."""

import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import bare, ended, wait_for

from mesh_lm.commands import main as commands
from mesh_lm.commands.main import COMMANDS, main

ROOT = Path(__file__).parents[3]


class Printed(NamedTuple):
    status: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Printed:
    status = main(argv)
    return Printed(status, *capsys.readouterr())


def test_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--help")
    assert (status, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert names[: len(COMMANDS)] == list(COMMANDS)
    assert run(capsys).out == out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    import jax

    status, out, _ = run(capsys, "--version")
    assert status == 0
    assert out.startswith("mesh_lm ")
    assert f"jax {jax.__version__}" in out


MISTAKES = {
    "trian": "mesh-lm has no command of the name 'trian'; did you mean mesh-lm train?",
    "fly": f"mesh-lm has no command of the name 'fly'; it has {', '.join(COMMANDS)}",
    "--print-completion=csh": "--print-completion=csh: expected one of the shells bash, zsh, fish",
    "generate --propmt=a": (
        "bad command line\n  - --propmt: there is no such option; did you mean --prompt?\n  - --checkpoint: "
        "missing; A run's output directory (its newest checkpoint), one step in its `checkpoints`, "
        "or a Hugging Face model directory"
    ),
    "bench lodaer": "mesh-lm bench lodaer: there is no such benchmark; did you mean loader?; see mesh-lm bench",
    "launch --devices=4 trian.py": f"trian.py: there is no such script in {ROOT}; did you mean train.py?",
    "launch trian": f"trian: there is no such script in {ROOT}; did you mean train?",
    "launch -m mesh_lm.genrate": "-m mesh_lm.genrate: Python finds no module named mesh_lm.genrate",
    "launch -m": (
        "name a Python script, such as train.py, a command, such as train, or -m and a module, "
        "such as mesh_lm.generate"
    ),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(capsys, *words.split()) == (1, "", f"error: {MISTAKES[words]}\n")


WAITS_AT_ITS_END = """
import pathlib, sys, threading, time
from mesh_lm.commands import main

def command(name, argv, options):
    threading.Thread(target=time.sleep, args=(60,)).start()  # for which Python waits
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)

main._run = command
main._prepare_process()
main.leave(main.run("evaluate", []))
"""


def test_a_second_ctrl_c_ends_a_command_at_once(tmp_path: Path) -> None:
    """Where it waits for a thread at its end; without a traceback."""
    begun = tmp_path / "begun"
    command = [sys.executable, "-c", WAITS_AT_ITS_END, str(begun)]
    process = subprocess.Popen(
        command, env=bare(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(begun.exists, process)
    process.send_signal(signal.SIGINT)
    assert process.stdout and process.stdout.readline() == "stopped by Ctrl-C\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert (ended(process), process.returncode) == ("ended at once by a second Ctrl-C\n", 130)


COMPLETED = {
    "mesh-lm tr": "train",
    "mesh-lm checkpoint ve": "verify",
    "mesh-lm convert de": "deepspeed",
    "mesh-lm convert deepspeed --skip": "--skip-unknown",
    "mesh-lm train --optimizer.learn": "--optimizer.learning_rate",
    "mesh-lm generate --temp": "--temperature",
    "mesh-lm launch --per": "--per-node",
    "mesh-lm plan --max": "--max-microbatch --max-tensor",
    "mesh-lm plan by": "bytes",
    "mesh-lm plan bytes --dev": "--devices",
    "mesh-lm plan bytes --tar": "",
    "mesh-lm by": "",
    "mesh-lm study sc": "scaling",
    "mesh-lm study strategies --seq": "--seq-len",
    "mesh-lm train --init": "--init_from",
}


def test_bash_completes(tmp_path: Path) -> None:
    """Runs the printed script in a real shell."""
    printed = subprocess.run(
        [sys.executable, "-m", "mesh_lm", "--print-completion", "bash"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (tmp_path / "mesh-lm.bash").write_bytes(printed.stdout)
    lines = [f". {tmp_path}/mesh-lm.bash"]
    for words in COMPLETED:
        lines.append(
            f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tyro_mesh_lm; "
            "echo ${COMPREPLY[*]}"
        )
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert dict(zip(COMPLETED, done.stdout.split("\n"), strict=False)) == COMPLETED, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "generate",
        "evaluate",
        "launch",
        "prepare",
        "checkpoint diff",
        "convert deepspeed",
        "convert megatron",
        "explain",
        "export",
        "import",
        "plan",
        "plan bytes",
        "study bytes",
        "study strategies",
        "study scaling",
        "pipeline",
    ],
)
def test_help_spells_options_as_the_guides_do(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dashes."""
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    out = capsys.readouterr().out
    assert " --" in out
    assert not re.findall(r" --\w*_\w*", out)
    assert "None}" not in out


def test_fields_of_a_config_have_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    assert "--train.global_batch " in capsys.readouterr().out


HEAVY = ("jax", "flax", "rich", "numpy", "tyro")
LIGHT = {
    "--help": HEAVY,
    "--version": HEAVY,
    "trian": HEAVY,
    "prepare --help": HEAVY[:2],
    "generate --help": HEAVY[:2],
    "generate --propmt=a": HEAVY[:2],
    "evaluate --help": HEAVY[:2],
    "import --help": HEAVY[:2],
    "export --help": HEAVY[:2],
    "checkpoint verify --help": HEAVY[:2],
    "launch --help": HEAVY[:2],
    "launch nowhere.py": HEAVY[:2],
    "pipeline --help": HEAVY[:2],
    "study scaling --help": HEAVY[:2],
    "study strategies --compile=-1": HEAVY[:2],
    "bench": HEAVY,
    "train --help": ("flax", "optax", "orbax", "grain", "matplotlib"),
}
"""Command line -> packages that it must not import."""


def test_what_help_and_mistakes_do_not_import() -> None:
    """Each import costs the user time: JAX alone about a second on two cores."""
    code = (
        "import io, json, os, sys\n"
        "from mesh_lm.commands.main import main\n"
        f"for words, absent in {LIGHT!r}.items():\n"
        "    if os.fork() == 0:\n"
        "        sys.stdout = sys.stderr = io.StringIO()\n"
        "        try:\n"
        "            main(words.split())\n"
        "        except SystemExit:\n"
        "            pass\n"
        "        there = [name for name in absent if name in sys.modules]\n"
        "        os.write(1, (json.dumps([words, there]) + chr(10)).encode())\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f'["{words}", []]' for words in LIGHT], done.stderr


def test_a_reader_that_has_enough() -> None:
    """As `mesh-lm configs | head -1`: no traceback."""
    program = f"{sys.executable} -m mesh_lm configs"
    done = subprocess.run(
        ["bash", "-c", f"{program} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.returncode in (0, 128 + 13) and not done.stderr, done.stderr


def test_both_doors_are_one() -> None:
    """`python -m mesh_lm.X` and `mesh-lm X`; the launcher exits with its own status for
    mistakes."""
    for words in (["-m", "mesh_lm", "launch"], ["-m", "mesh_lm.launch"]):
        done = subprocess.run(
            [sys.executable, *words, "nowhere.py"], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (
            1,
            "",
            f"error: nowhere.py: there is no such script in {ROOT}\n",
        )


def test_the_installed_launcher_starts_commands_and_modules_of_the_working_directory(
    tmp_path: Path,
) -> None:
    """Its sys.path has neither the working directory nor, in an editable installation, that of
    mesh_lm."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "hello.py").write_text("print('hello from', __name__)", encoding="utf-8")
    launcher = [str(Path(sys.executable).with_name("mesh-lm")), "launch", "--health=off"]

    def output(*words: str) -> str:
        done = subprocess.run([*launcher, *words], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "hello from __main__" in output("-m", "mine.hello")
    assert "-m mine.helo: Python finds no module named mine.helo" in output("-m", "mine.helo")
    mistake = output("train", "gpt_tiny", "--train.stepz=2")
    assert "no such field; did you mean --train.steps?" in mistake
    assert "no module named" not in mistake


def test_a_python_that_is_too_old_is_answered_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """By train.py in a clone; pip's answer is that of requires-python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, commands.OLDEST_PYTHON))}"
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.13")
    with pytest.raises(
        SystemExit,
        match=r"^error: mesh_lm needs Python 3\.11 or newer, and this is Python 3\.10\.13$",
    ):
        commands.door("train")


OLD_PYTHON = next(filter(None, map(shutil.which, ("python3.10", "python3.9"))), None)


@pytest.mark.skipif(not OLD_PYTHON, reason="no Python 3.10 here")
def test_an_old_python_itself() -> None:
    done = subprocess.run([str(OLD_PYTHON), "train.py"], cwd=ROOT, capture_output=True, text=True)
    if "not found" in done.stderr:
        pytest.skip(f"{OLD_PYTHON} starts no Python")  # a shim of pyenv
    assert done.returncode == 1 and re.fullmatch(
        r"error: mesh_lm needs Python 3.11 or newer, and this is Python 3\.\S+\n", done.stderr
    )
