"""The engines: each is started once, for all tests here that want it."""

import pytest

from tests.integration.support.engines import start_bench


# Over the package, so that pytest puts the tests of an engine next to each other, whatever their file.
@pytest.fixture(scope="package")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The engine of the `EngineKind` that is the test's parameter."""
    bench = start_bench(tmp_path_factory.mktemp("engine"), request.param)
    yield bench
    bench.close()
