"""Signals that stop a process gracefully."""

import signal

import pytest

from bridge.processes import stop_signals


@pytest.mark.parametrize(("handler", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_closed_terminal_stops_a_process_unless_nohup_started_it(handler, stops):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        found = stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert set(found) == {signal.SIGINT, signal.SIGTERM} | ({signal.SIGHUP} if stops else set())
