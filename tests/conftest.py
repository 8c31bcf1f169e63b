"""Test tiers: which tests are unit tests, and which are skipped here."""

import asyncio
import glob
import inspect
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.postgres import data_folder, database, module_database, postgres

__all__ = ["data_folder", "database", "module_database", "postgres"]  # fixtures, for all tests
pytest_plugins = ["tests.support.budget"]

# A deadline asks for a machine that is not busy. A file sets max_examples only where an example takes a second.
settings.register_profile("daily", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=300)

TIERS = ("unit", "integration", "nightly", "gpu")
CORES = os.sched_getaffinity(0)
"""Before `pytest_configure` binds this process to its own."""
LONGEST_FIRST = (
    "test_resize.py",
    "test_killed_job.py",
    "test_far_actor.py",
    "test_many_engines.py",
    "test_actor_process.py",
    "test_serial_job.py",
    "test_job.py",
    "test_profile.py",
)
"""Files with engines whose tests take a minute and more, each with engines of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-nightly", action="store_true", help="run the tests marked nightly")
    parser.addoption(
        "--engines-apart",
        action="store_true",
        help="with -n: each process has cores of its own, and tests that share an engine run in one process",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Loads the hypothesis profile; with `--engines-apart` binds this process, and with it what its tests start, to its
    cores: engines on the same cores hold each other up."""
    settings.load_profile("nightly" if config.getoption("--run-nightly") else "daily")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.getoption("--engines-apart") and worker:
        cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        index = int(worker.removeprefix("gw"))
        os.sched_setaffinity(0, cores[index::count] or {cores[index % len(cores)]})


class ByEngine(LoadScopeScheduling):
    """Hands out together what shares an engine: in tests/integration/engine the tests of a parameter, or of a file.

    (`--dist=loadgroup` renames its tests, which pytest 9.2 no longer allows: xdist 3.8 then forms no groups.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if not file.startswith("tests/integration/engine/"):
            return nodeid
        return test.partition("[")[2] or file


def by_length(item: pytest.Item) -> int:
    """A sort key: the longest tests with engines come first, so that no core is left alone with one at the end."""
    name = item.path.name
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByEngine | None:
    return ByEngine(config, log) if config.getoption("--engines-apart") else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in an event loop of its own; one that takes five minutes hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 300))
    return True


@pytest.fixture
def all_cores() -> Iterator[None]:
    """For a test whose engines must find cores to share out: what it starts may run on all that there are."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    yield
    os.sched_setaffinity(0, own)


def gpu_visible() -> bool:
    """True where an NVIDIA GPU exists and CUDA_VISIBLE_DEVICES does not hide it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and bool(glob.glob("/dev/nvidia[0-9]*"))


# First, so that `-m unit` already sees the markers added here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_nightly = config.getoption("--run-nightly")
    skip_nightly = None if is_nightly else pytest.mark.skip(reason="nightly: give --run-nightly")
    skip_gpu = None if gpu_visible() else pytest.mark.skip(reason="gpu: no NVIDIA GPU is visible")
    if config.getoption("--engines-apart"):
        items.sort(key=by_length)
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.unit)
        if skip_nightly and item.get_closest_marker("nightly"):
            item.add_marker(skip_nightly)
        if skip_gpu and item.get_closest_marker("gpu"):
            item.add_marker(skip_gpu)
