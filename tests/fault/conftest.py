"""Fixtures of the fault suite."""

from pathlib import Path

import pytest
from fault.job import EVERY, STEPS, Job, arguments, certificates, corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def undisturbed_output(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output, and in `log` what was printed, of a run of two processes that nobody disturbs."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Job(directory / "faults", arguments(data, directory / "run")) as job:
        assert job.ended() == 0, job.log
    (directory / "run" / "log").write_text(job.log)
    return directory / "run"


@pytest.fixture(scope="session")
def undisturbed(undisturbed_output: Path) -> dict[int, str]:
    """What that run has at each save: digests of its state and of its samples."""
    found = dict(certificates((undisturbed_output / "log").read_text()))
    assert sorted(found) == [*range(EVERY, STEPS + 1, EVERY)]
    return found
