"""F19: damaged data. Without digests, a run reads other tokens, or other samples, in silence, or
dies of an IndexError."""

import dataclasses
import io
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fault.job import STEPS, Job, arguments, certificates, corpus

from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
from mesh_lm.data.corpus import prepare
from mesh_lm.data.prepare.run import prepare as prepare_text
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig

pytestmark = pytest.mark.fault
CASES = 350
DAMAGES = ("flip", "rewrite", "zero", "truncate", "delete", "another's")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all that three kinds of data consist of: two prepared prefixes, a cached
    corpus, and the caches of indices."""
    root = tmp_path_factory.mktemp("data")
    (root / "text").mkdir()
    text = corpus(root).read_text(encoding="utf-8")
    for i in range(40):
        (root / "text" / f"{i:02}.txt").write_text(
            text[i * 2500 : (i + 2) * 2500], encoding="utf-8"
        )
    for name, files in (("a", root / "corpus.txt"), ("b", root / "text")):
        prepare_text((str(files),), str(root / name), "bytes", workers=1, output=io.StringIO())
    for kind in KINDS:
        samples(root, kind, [])
    return root


KINDS: dict[str, dict[str, object]] = {
    "blend": {"documents": "joined"}, "packed blend": {"documents": "packed"},
    "text": {"documents": "packed"},
}  # fmt: skip


def samples(root: Path, kind: str, said: list[str]) -> tuple[bytes, ...]:
    """Returns all that a run reads of this kind of data, training and held-out."""
    data = DataConfig(
        cache=str(root / f"cache {kind}"),
        split="80,20",
        tokenizer="bytes",
        documents=KINDS[kind]["documents"],
    )  # pyright: ignore[reportArgumentType]
    blend = ("0.7", str(root / "a"), "0.3", str(root / "b"))
    data = dataclasses.replace(
        data,
        **({"path": str(root / "text")} if kind == "text" else {"blend": blend, "tokenizer": ""}),
    )
    config = TrainConfig(
        model=DecoderConfig(vocab_size=260, seq_len=64),
        output="",
        train=TrainLoop(steps=1),
        data=data,
    )
    found = prepare(data, vocab=0, progress=said.append)
    orders = (found.training_order(config, None, 2000), 2000), (found.heldout_order(config), None)
    windows = [order.read(np.arange(n or len(order))) for order, n in orders]
    facts = json.dumps(
        [
            found.train_tokens,
            found.heldout_tokens,
            found.heldout_bytes,
            found.eod,
            found.fingerprint,
        ]
    )
    return facts.encode(), *(
        array.tobytes() for each in windows for array in (each.tokens, each.labels, each.weights)
    )


def damaged(path: Path, how: str, chance: random.Random) -> bool:
    """Damages the file. Returns whether it changed."""
    before = path.read_bytes()
    content, at = bytearray(before), chance.randrange(max(1, len(before)))
    if how == "flip" and before:
        content[at] ^= 1 << chance.randrange(8)
    elif how == "rewrite":
        content[at : at + 512] = chance.randbytes(len(content[at : at + 512]))
    elif how == "zero":
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    elif how == "truncate":
        del content[at:]
    elif how == "another's":
        pool = [
            other
            for other in path.parents[1].rglob(f"*{path.suffix}")
            if other.name == path.name or path.parent == other.parent
        ]
        content = bytearray(chance.choice(pool).read_bytes())
    path.unlink() if how == "delete" else path.write_bytes(content)
    return how == "delete" or bytes(content) != before


@pytest.mark.parametrize("kind", KINDS)
def test_f19_no_damage_is_read_in_silence(
    pristine: Path,
    tmp_path: Path,
    kind: str,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is read has the bits that were written, or one error names the file. An index is
    computed again. Without digests: a notice."""
    root, seed = tmp_path / "run", 0
    shutil.copytree(pristine, root)
    intact, count = samples(root, kind, []), Counter()
    found = [*root.glob(f"cache {kind}/**/*"), *([] if kind == "text" else root.glob("[ab].*"))]
    contents = {path: path.read_bytes() for path in sorted(found) if path.is_file()}
    while count["cases"] < CASES:
        chance, how = random.Random(f"{kind} {seed}"), DAMAGES[seed % len(DAMAGES)]
        for path, content in contents.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        path, seed = chance.choice([*contents]), seed + 1
        if not damaged(path, how, chance):
            continue
        count["cases"] += 1
        said: list[str] = []
        capsys.readouterr()
        try:
            read = samples(root, kind, said)
        except ConfigError as error:
            assert str(root) in str(error) and "\n" not in str(error), (path, how, error)
            count["refused"] += 1
            continue
        assert read == intact, f"silent: {how} of {path}"
        out = capsys.readouterr().out
        if path.parent.parent.name == "indices" and "index cache" in out:
            count["computed again"] += 1
        elif any("mesh-lm prepare seal" in line for line in said):
            assert path.suffix == ".digests" and how == "delete"
            count["notice"] += 1
        else:
            count[f"no effect: {how} of {path.suffix}"] += 1
    assert (
        count["refused"] >= CASES // 4
        and count["refused"] + count["computed again"] + count["notice"] >= CASES * 0.9
    ), count
    record_property("cases of F19", count["cases"])
    record_property("refused", count["refused"])
    record_property("computed again", count["computed again"])


def run(tmp_path: Path, data: Path, name: str, **changes: object) -> Job:
    """One process with one device, which does not have to send heartbeats in time on a busy
    machine: that is F4's."""
    alone = {
        "mesh__data": 1,
        "mesh__fsdp": 1,
        "rules": "ddp",
        "health__heartbeat": 60,
        "health__stall": 0,
    }
    settings = arguments(data, tmp_path / name, data__cache=tmp_path / "cache", **alone, **changes)
    return Job(tmp_path / "faults", settings, workers=1, devices=1, options=["--heartbeat=60"])


def test_f19_a_run_on_damaged_tokens(data: Path, tmp_path: Path) -> None:
    """It ends with status 1 and one error; with the file restored, the same command has the bits of
    a run that was not disturbed."""
    with run(tmp_path, data, "undisturbed") as job:
        assert job.ended() == 0, job.log
    undisturbed = certificates(job.log)[STEPS]
    (tokens,) = (tmp_path / "cache").glob("*/train.bin")
    intact = tokens.read_bytes()
    tokens.write_bytes(intact[:-5000] + bytes(100) + intact[-4900:])
    with run(tmp_path, data, "run") as job:
        assert job.ended() == 1, job.log
    assert re.search(
        rf"error: {tokens} is damaged: bytes [\d,]+ to [\d,]+ are not as they were when", job.log
    ), job.log
    assert f"remove {tokens.parent}" in job.log and "Traceback" not in job.log, job.log
    tokens.write_bytes(intact)
    with run(tmp_path, data, "run") as job:
        assert job.ended() == 0, job.log
    assert certificates(job.log)[STEPS] == undisturbed, job.log


def test_f19_a_run_on_a_damaged_index(data: Path, tmp_path: Path) -> None:
    """The index is computed again; the same bits as before."""
    proofs = []
    for n in range(2):
        with run(tmp_path, data, f"run-{n}", data__documents="packed") as job:
            assert job.ended() == 0, job.log
        proofs.append(certificates(job.log))
        (starts,) = tmp_path.glob("cache/indices/packed-*/starts.npy")
        assert (
            len(
                re.findall(
                    (
                        r"index cache: packed-\w+ in \S+ is not as it was written \(CRC-32 of "
                        r"starts.npy\)"
                    ),
                    job.log,
                )
            )
            == n
        ), job.log
        starts.write_bytes(starts.read_bytes()[:-8] + bytes([9] * 8))
    assert proofs[0] == proofs[1] and len(proofs[0]) == STEPS // 5
