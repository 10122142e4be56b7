"""A preparation that is killed, interrupted or out of disk space can be resumed and ends with the
same bytes."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE

from mesh_lm.data.indexed import Documents
from mesh_lm.data.prepare import plan
from mesh_lm.data.prepare.run import prepare
from mesh_lm.data.prepare.unfinished import Unfinished
from mesh_lm.data.tokenizer import load_tokenizer


def files_of(prefix: Path) -> dict[str, bytes]:
    """Returns the contents of all files of a preparation."""
    return {
        str(path.relative_to(prefix.parent)): path.read_bytes()
        for path in sorted(prefix.parent.rglob("*"))
        if path.is_file()
    }


COMMAND = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
from mesh_lm.data.prepare import plan, unfinished
from mesh_lm.commands.prepare import main
from mesh_lm.errors import ConfigError
plan.SHARD, unfinished._SYNC_SECONDS = 2000, 0.0
append = unfinished.Appender.append
def slowly(self, shard, encoded):
    time.sleep({pause})
    return append(self, shard, encoded)
unfinished.Appender.append = slowly
try:
    sys.exit(main(sys.argv[1:]))
except ConfigError as error:
    sys.exit(f"error: {{error}}")
"""


def begin(argv: list[str], pause: float = 0.03, **options: Any) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        **options.pop("env", {}),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(pause=pause), *argv], env=env, **pipes, **options
    )


def arguments(
    tmp_path: Path, tokenizer: str, workers: int, root: Path, names: Iterable[str]
) -> list[str]:
    return [
        f"--output={tmp_path / 'x'}",
        f"--tokenizer={tokenizer}",
        f"--workers={workers}",
        "--input",
        *(str(root / n) for n in names),
    ]


def wait_for_lines(journal: Path, n: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= n:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def children(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    ]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for workers in /proc")
def test_killed_and_continued_gives_the_same_bytes(
    inputs: Any, tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
):
    root, documents = inputs
    names = [str(root / name) for name in documents]
    monkeypatch.setattr(plan, "SHARD", 2000)
    (tmp_path / "whole").mkdir()
    prepare(
        tuple(names), str(tmp_path / "whole" / "x"), tokenizer_file, workers=1, output=io.StringIO()
    )
    ids, found = load_tokenizer(tokenizer_file), Documents(tmp_path / "whole" / "x")
    assert [ids.decode(found[i][:-1]) for i in range(len(found))] == [
        text for texts in documents.values() for text in texts
    ]
    n_shards = len(list(plan.make(names, "text").shards()))

    prefix = tmp_path / "killed" / "x"
    journal = Path(f"{prefix}.parts") / "journal.jsonl"
    common = [f"--output={prefix}", f"--tokenizer={tokenizer_file}", "--input", *names]
    for workers, lines in ((2, n_shards // 5), (1, n_shards // 2)):
        process = begin([*common, f"--workers={workers}"])
        wait_for_lines(journal, lines, process)
        workers_of = children(process.pid)
        process.kill()
        process.communicate()
        assert not prefix.with_suffix(".bin").exists() and not prefix.with_suffix(".json").exists()
        end = time.monotonic() + PATIENCE
        while any(map(is_alive, workers_of)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_alive, workers_of))  # no worker outlives its parent
    with open(journal, "ab") as file:
        file.write(b'{"unit": 9')  # as a power failure may leave it
    with open(journal.with_name("tokens.bin"), "ab") as file:
        file.write(b"more")
    process = begin([*common, "--workers=2"], pause=0)
    out, error = process.communicate()
    assert (process.returncode, error) == (0, "")
    assert "continuing after" in out
    assert files_of(prefix) == files_of(tmp_path / "whole" / "x")


@pytest.mark.parametrize(
    "moment", ["os.rename", "os.replace", "write_index", "json.dumps", "shutil.rmtree"]
)
def test_killed_at_the_end(
    moment: str, inputs: Any, tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
):
    """Files are renamed one by one; whichever rename fails, the next call ends with the same
    files."""
    root, _ = inputs
    given = ((str(root / "d.txt"),), str(tmp_path / "x"), tokenizer_file)
    prepare(*given, workers=1, output=io.StringIO())
    whole = files_of(tmp_path / "x")
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    class Killed(BaseException):
        pass

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    finish = Unfinished.finish

    def finish_and_die(self: Unfinished, *args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"mesh_lm.data.prepare.unfinished.{moment}", killed)
            finish(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "finish", finish_and_die)
        with pytest.raises(Killed):
            prepare(*given, workers=1, output=io.StringIO())
    left = [path for path in tmp_path.iterdir() if "parts" in path.name]
    assert len(left) == 1 and (left[0].name == "x.parts") == (moment != "shutil.rmtree")
    prepare(*given, workers=1, output=io.StringIO())
    assert {
        name: data
        for name, data in files_of(tmp_path / "x").items()
        if not name.startswith(".x.parts.")
    } == whole


def test_ctrl_c(inputs: Any, tmp_path: Path, tokenizer_file: str):
    root, documents = inputs
    process = begin(
        arguments(tmp_path, tokenizer_file, 2, root, documents),
        start_new_session=True,
    )
    wait_for_lines(tmp_path / "x.parts" / "journal.jsonl", 3, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, the workers included
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert error == (
        f"\nstopped; {tmp_path / 'x'}.parts keeps what is done, and the same command continues "
        "from there\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.parts"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for workers in /proc")
def test_a_worker_that_dies(inputs: Any, tmp_path: Path, tokenizer_file: str):
    root, _ = inputs
    process = begin(arguments(tmp_path, tokenizer_file, 1, root, ["a.jsonl"]), pause=0.2)
    wait_for_lines(tmp_path / "x.parts" / "journal.jsonl", 1, process)
    for pid in children(process.pid):
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    _, error = process.communicate(timeout=PATIENCE)
    assert error == (
        "error: a worker process died, perhaps out of memory; finished work is kept: run the same "
        "command again with fewer --workers\n"
    )


@pytest.mark.slow
def test_a_full_disk(inputs: Any, tmp_path: Path, tokenizer_file: str):
    """A file size limit stands in for a full disk: the same write fails."""
    import resource

    root, documents = inputs
    argv = arguments(tmp_path, tokenizer_file, 1, root, documents)
    process = begin(
        argv,
        pause=0,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)),
    )
    _, error = process.communicate()
    assert process.returncode == 1
    assert (
        error.startswith("error: cannot write ")
        and "the same command resumes once" in error
        and "Traceback" not in error
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.parts"]
    assert begin(argv, pause=0).wait() == 0
    assert len(Documents(tmp_path / "x")) == sum(map(len, documents.values()))
