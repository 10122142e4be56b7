"""Eight CPU devices for numerics, and a budget of compilations per test file, because XLA compiles
dominate a test run's time."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A compilation cache that the tests of a run, and their processes, share; set MESH_LM_TEST_CACHE to
# keep it for later runs.
if "MESH_LM_TEST_CACHE" not in os.environ:
    # before xdist starts its workers: they share it
    os.environ["MESH_LM_TEST_CACHE"] = tempfile.mkdtemp(prefix="mesh_lm-tests-")
    atexit.register(shutil.rmtree, os.environ["MESH_LM_TEST_CACHE"], ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["MESH_LM_TEST_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0"
    # which take twice as long to compile
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
os.environ["JAX_PLATFORMS"] = "cpu"
# workers, and processes that tests start, would compile every module again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import costs
import hypothesis
import jax
import pytest

# A job in the background ignores SIGINT, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Objects from imports are permanent; without this the collector would visit them again and again
# during tracing.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles: list[str] = []
_COSTS: dict[str, dict[str, dict[str, float]]] = json.loads(
    (Path(__file__).parent / "seconds.json").read_text(encoding="utf-8")
)
_FRAMES = jax.config.jax_traceback_in_locations_limit
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **kwargs: _compiles.append(event) if event == _COMPILE_EVENT else None
)


def pytest_configure(config: pytest.Config) -> None:
    """A JUnit file gets what each test cost."""
    config.pluginmanager.register(costs.Recorder(), "costs")


@pytest.fixture(scope="module", autouse=True)
def compile_budget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a file that compiles more XLA programs than its COMPILE_BUDGET (default 0). Programs
    read from the cache on disk count too."""
    before = len(_compiles)
    yield
    budget, used = getattr(request.module, "COMPILE_BUDGET", 0), len(_compiles) - before
    assert used <= budget, (
        f"{request.module.__name__} compiled {used} programs, over its COMPILE_BUDGET of {budget}"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Programs record their source lines only for tests that may look at them, because that slows
    compilation down by a tenth."""
    jax.config.update(
        "jax_traceback_in_locations_limit", _FRAMES if item.get_closest_marker("deviceless") else 0
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns the workers of `-n auto`: one more than cores, because tests also wait for processes
    and disks; each takes up to 3 GB."""
    return min((os.cpu_count() or 1) + 1, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps a file's tests together, because they share compilations; files stay in the order from
    below."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def _work(items: list[pytest.Item]) -> float:
    """Returns the expected seconds of a file's tests: those that benchmarks/suite_costs.py measured
    last, or a guess."""
    tiers = {_tier(item) for item in items}
    known = _COSTS.get(str(items[0].path.relative_to(items[0].config.rootpath)), {})
    if tiers <= known.keys():
        return sum(known[tier]["seconds"] for tier in tiers)
    marked = sum(
        5 if item.get_closest_marker("slow") or item.get_closest_marker("deviceless") else 0
        for item in items
    )
    return marked + getattr(getattr(items[0], "module", None), "COMPILE_BUDGET", 0) / 5


def _tier(item: pytest.Item) -> str:
    if item.get_closest_marker("exhaustive"):
        return "full"
    return (
        "ci" if item.get_closest_marker("slow") or item.get_closest_marker("deviceless") else "fast"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks exhaustive tests as slow. With several workers the longest files run first.

    Tests marked deviceless need XLA's compiler for CUDA. With MESH_LM_DEVICELESS=required its
    absence is a failure, as on CI.
    """
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = [list(group) for _, group in itertools.groupby(items, lambda item: item.path)]
        items[:] = [item for file in sorted(files, key=_work, reverse=True) for item in file]
    if os.environ.get("MESH_LM_DEVICELESS") == "required" or importlib.util.find_spec(
        "jax_cuda13_plugin"
    ):
        return
    absent = pytest.mark.skip(reason="needs XLA's compiler for CUDA: pip install -e '.[aot]'")
    for item in items:
        if item.get_closest_marker("deviceless"):
            item.add_marker(absent)


@pytest.fixture(scope="session")
def reports() -> str:
    """A directory for compile_report(cache=...), so that a program that two tests use is compiled
    once."""
    return os.path.join(
        os.environ.get("MESH_LM_REPORTS") or os.environ["JAX_COMPILATION_CACHE_DIR"], "reports"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """If deviceless tests are required, a skipped one fails the run, whatever the reason."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("MESH_LM_DEVICELESS") == "required" and any(
        "deviceless" in report.keywords for report in skipped
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
