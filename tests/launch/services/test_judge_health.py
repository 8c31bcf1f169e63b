from launch.services.judge_server import LOOK_S, MAX_MISSED, STEADY_S, SidecarHealth

START_S = 100.0


def started() -> SidecarHealth:
    return SidecarHealth(start_timeout_s=START_S, now_s=1000.0)


def serving(*, from_s: float = 1050.0) -> SidecarHealth:
    health = started()
    assert health.looked(answers=True, now_s=from_s) == ""
    return health


def test_server_that_starts_is_looked_at_each_time_and_killed_when_it_takes_too_long():
    health = started()
    assert health.is_due(1000.0)
    assert health.looked(answers=False, now_s=1000.0 + START_S) == ""
    said = health.looked(answers=False, now_s=1001.0 + START_S)
    assert said == "start timed out after 100 s (supervision.start_timeout_s)"


def test_server_that_serves_is_looked_at_now_and_then():
    health = serving(from_s=1050.0)
    assert not health.is_due(1050.0 + LOOK_S - 0.5) and health.is_due(1050.0 + LOOK_S)
    assert health.looked(answers=True, now_s=9999.0) == ""  # its start was in time


def test_server_that_misses_many_looks_in_a_row_is_killed():
    health = serving()
    for _ in range(3):
        assert [health.looked(answers=False, now_s=1060.0) for _ in range(MAX_MISSED - 1)] == [""] * (MAX_MISSED - 1)
        assert health.looked(answers=True, now_s=1060.0) == ""  # it was only busy
    said = [health.looked(answers=False, now_s=1060.0) for _ in range(MAX_MISSED)]
    assert said[:-1] == [""] * (MAX_MISSED - 1) and said[-1] == f"{MAX_MISSED} failed health checks in a row"


def test_server_is_steady_by_how_long_it_served_whatever_its_start_or_its_end_took():
    health = started()
    assert not health.looked(answers=False, now_s=1000.0 + STEADY_S + 1)
    assert not health.was_steady  # it never served
    health.looked(answers=True, now_s=1090.0)
    health.looked(answers=True, now_s=1090.0 + STEADY_S - 1)
    health.looked(answers=False, now_s=1090.0 + 2 * STEADY_S)
    assert not health.was_steady  # it hung
    health.looked(answers=True, now_s=1090.0 + 2 * STEADY_S)
    assert health.was_steady
