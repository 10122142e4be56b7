"""F17: damaged entries of the compilation cache. JAX alone trains to other weights with some of
them, in silence, and dies of others."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fault.job import STEPS, Job, arguments, certificates

from mesh_lm.distributed.compile_cache import VerifiedPath

pytestmark = pytest.mark.fault
DAMAGES = ("flip", "zero", "truncate", "no digest", "other's name")


def damaged(directory: Path, how: str) -> set[str]:
    """Damages every entry. Returns their names."""
    entries = sorted(directory.glob("*-cache"))
    contents = {entry.name: entry.read_bytes() for entry in entries}
    for entry, following in zip(entries, [*entries[1:], entries[0]], strict=True):
        content, chance = (
            bytearray(contents[entry.name]),
            random.Random(f"{how} {len(contents[entry.name])}"),
        )
        if how == "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        elif how == "zero":
            start = chance.randrange(len(content) - 64)
            content[start : start + 64] = bytes(64)
        elif how == "truncate":
            del content[chance.randrange(len(content)) :]
        elif how == "no digest":
            del content[-32:]
        else:
            content = contents[following.name]
        assert content != contents[entry.name]
        entry.write_bytes(content)
    return {*contents}


@pytest.mark.parametrize("how", DAMAGES)
def test_f17_a_damaged_compile_cache(
    data: Path,
    undisturbed: dict[int, str],
    tmp_path: Path,
    how: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Every entry that is read is named, deleted by the process that reads it first, and compiled
    again; same bits. The next start finds all of them intact."""
    cache = tmp_path / "xla" / "verified"
    shutil.copytree(data.parent / "xla" / "verified", cache)
    before = damaged(cache, how)
    with Job(
        tmp_path / "faults",
        arguments(data, tmp_path / "run", launch__compile_cache=tmp_path / "xla"),
    ) as job:
        assert job.ended() == 0, job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS], job.log
    named = re.findall(
        (
            r"compile cache: (\S+) in \S+ is not as it was written \(SHA-256\); it is deleted and "
            r"compiled again"
        ),
        job.log,
    )
    record_property("entries", len({*named}))
    assert len({*named}) >= 4 and {*named} <= before and "Traceback" not in job.log, job.log
    assert all((VerifiedPath(str(cache)) / name).exists() for name in named)
    if how != "flip":
        return
    with Job(
        tmp_path / "faults",
        arguments(data, tmp_path / "again", launch__compile_cache=tmp_path / "xla"),
    ) as job:
        assert job.ended() == 0, job.log
    assert certificates(job.log)[STEPS] == undisturbed[STEPS] and "compile cache" not in job.log, (
        job.log
    )


def test_f17_hosts_that_share_a_cache_do_not_meet_half_an_entry(data: Path, tmp_path: Path) -> None:
    """Two runs that start at once with one empty cache: entries are renamed into place."""
    both = [
        Job(
            tmp_path / f"faults-{n}",
            arguments(data, tmp_path / f"run-{n}", launch__compile_cache=tmp_path / "xla"),
            workers=1,
            devices=4,
        )
        for n in range(2)
    ]
    with both[0], both[1]:
        for job in both:
            assert job.ended() == 0, job.log
            assert (
                "compile cache" not in job.log
                and certificates(job.log)[STEPS] == certificates(both[0].log)[STEPS]
            ), job.log
    assert not [*(tmp_path / "xla").rglob(".*")], "no temporary file is left"
