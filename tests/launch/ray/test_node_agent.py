"""A station whose node is asked to end."""

import os
import signal
from types import SimpleNamespace

from configs.sections import SupervisionConfig
from launch.ray import node_agent
from launch.supervision.hang_detector import HangTimeouts

ENDLESS = HangTimeouts(
    first_heartbeat_timeout_s=1e9, heartbeat_timeout_s=1e9, start_timeout_s=1e9, progress_timeout_s=1e9
)


def test_station_gives_its_process_as_long_to_stop_as_the_config_says_then_ends_as_it_would_have(monkeypatch):
    clock, calls = SimpleNamespace(now_s=0.0), []
    clock.monotonic = lambda: clock.now_s

    def kill_after(is_over):
        while not is_over():
            clock.now_s += 1
        calls.append(clock.now_s)

    before = signal.getsignal(signal.SIGTERM)
    stop_s = SupervisionConfig().shutdown_grace_s
    one = node_agent.NodeAgent("learner", mark="nobody", bounds=ENDLESS, stop_s=stop_s, files={}, environment={})
    try:
        monkeypatch.setattr(node_agent, "time", clock)
        monkeypatch.setattr(os, "kill", lambda pid, number: calls.append((pid, number)))
        child = SimpleNamespace(request_stop=lambda: calls.append("asked"), kill_after=kill_after)
        one._child = child  # pyright: ignore[reportAttributeAccessIssue]
        one._end(signal.SIGTERM, None)
    finally:
        monkeypatch.undo()
        one._child = None
        one.close()
        signal.signal(signal.SIGTERM, before)
    assert calls == ["asked", stop_s, (os.getpid(), signal.SIGTERM)]
