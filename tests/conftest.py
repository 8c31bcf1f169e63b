"""Test tiers: which tests are unit tests, and which are skipped here."""

import glob
import os

import pytest
from hypothesis import settings

# A deadline asks for a machine that is not busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

TIERS = ("unit", "integration", "slow", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow")


def gpu_visible() -> bool:
    """True where an NVIDIA GPU exists and CUDA_VISIBLE_DEVICES does not hide it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and bool(glob.glob("/dev/nvidia[0-9]*"))


# First, so that `-m unit` already sees the markers added here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = None if config.getoption("--run-slow") else pytest.mark.skip(reason="slow: give --run-slow")
    skip_gpu = None if gpu_visible() else pytest.mark.skip(reason="gpu: no NVIDIA GPU is visible")
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.unit)
        if skip_slow and item.get_closest_marker("slow"):
            item.add_marker(skip_slow)
        if skip_gpu and item.get_closest_marker("gpu"):
            item.add_marker(skip_gpu)
