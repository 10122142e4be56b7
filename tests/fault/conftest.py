"""Fixtures of the fault tests."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault.hosts import two_hosts
from fault.job import EVERY, FIELDS, STEPS, Job, arguments, certificates, corpus


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts with addresses 10.77.0.1 and 10.77.0.2. Skips if this process may not create
    namespaces."""
    with two_hosts() as names:
        yield names


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def undisturbed_runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns, for given rules, the output directory of an undisturbed run of two processes; its
    `log` has what was printed."""

    @functools.cache
    def run(rules: str) -> Path:
        directory = tmp_path_factory.mktemp("undisturbed")
        settings = arguments(
            data, directory / "run", rules=rules, health__stall=60, health__heartbeat=60
        )
        # a busy machine is no fault
        with Job(directory / "faults", settings, options=["--heartbeat=60"]) as job:
            assert job.ended() == 0, job.log
        (directory / "run" / "log").write_text(job.log, encoding="utf-8")
        return directory / "run"

    return run


@pytest.fixture(scope="session")
def undisturbed_output(undisturbed_runs: Callable[[str], Path]) -> Path:
    """The output of the undisturbed run that others are compared with."""
    return undisturbed_runs(str(FIELDS["rules"]))


@pytest.fixture(scope="session")
def undisturbed(undisturbed_output: Path) -> dict[int, str]:
    """The undisturbed run's digests of state and samples at each save."""
    return saved_by(undisturbed_output)


def saved_by(output: Path) -> dict[int, str]:
    """Returns the digests of each save of an undisturbed run."""
    found = dict(certificates((output / "log").read_text(encoding="utf-8")))
    assert sorted(found) == [*range(EVERY, STEPS + 1, EVERY)]
    return found
