"""Pytest hooks for test cost: a time limit per tier, a list of costly unit tests, the skip reasons that CI allows."""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

TIME_LIMITS_S = (("nightly", 3600), ("engine", 900), ("integration", 600), ("heavy", 600), ("unit", 120))
"""Wall-clock limit per marker; the first marker that a test has decides. A loaded machine stays below each limit."""
MANY_MODULES = 50
"""A test that imports more modules than this pays for the tests after it, so its CPU time is not listed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-costly", type=float, metavar="S", help="list unit tests, not heavy, over S seconds of CPU")
    parser.addoption("--allowed-skips", metavar="FILE", help="fail on a skip whose reason matches no line of FILE")


def time_limit_s(item: pytest.Item) -> int:
    return next(limit for marker, limit in TIME_LIMITS_S if marker == "unit" or item.get_closest_marker(marker))


# Last: the tiers' own markers are added before.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(time_limit_s(item)))


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start_s, num_modules = _cpu_s(), len(sys.modules)
    yield
    if len(sys.modules) <= num_modules + MANY_MODULES:
        item.user_properties.append(("cpu_s", _cpu_s() - start_s))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    limit_s = config.getoption("--list-costly")
    if limit_s is not None:
        costs = {
            report.nodeid: dict(report.user_properties).get("cpu_s", 0.0)
            for outcome in ("passed", "failed")
            for report in terminalreporter.stats.get(outcome, [])
            if report.when == "call" and "unit" in report.keywords and "heavy" not in report.keywords
        }
        costly = {test: cost for test, cost in costs.items() if cost > limit_s}
        if costly:
            terminalreporter.section(f"over {limit_s:g} s of CPU: mark heavy or make cheaper")
        for test, cost in sorted(costly.items(), key=lambda entry: -entry[1]):
            terminalreporter.write_line(f"{cost:5.1f} s  {test}")
    for (reason, is_allowed), count in sorted(_skips(terminalreporter, config).items()):
        if not is_allowed:
            terminalreporter.write_line(f"not allowed by {config.getoption('--allowed-skips')}: {count} x {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or not isinstance(reporter, TerminalReporter) or session.exitstatus != pytest.ExitCode.OK:
        return
    if not all(is_allowed for _, is_allowed in _skips(reporter, session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skips(reporter: TerminalReporter, config: pytest.Config) -> Counter[tuple[str, bool]]:
    """Returns the number of skips per (reason, True if the reason is allowed); empty without `--allowed-skips`."""
    file = config.getoption("--allowed-skips")
    if not file:
        return Counter()
    lines = [line for line in Path(file).read_text().splitlines() if line and not line.startswith("#")]
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])]
    return Counter((reason, any(re.search(line, reason) for line in lines)) for reason in reasons)
