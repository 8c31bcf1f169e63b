"""How full the engine was, over the stretch that counts."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.bench.rig import load
from tests.bench.rig.load import LoadLog, Steady, mean_running


def applied(*ends_s: float) -> list[dict]:
    return [{"name": "apply", "ts": 1e6 * (end - 0.25), "dur": 0.25e6} for end in ends_s]


def test_steady_state_is_from_the_last_warm_up_update_to_the_last_one():
    events = [*applied(13.0, 11.0, 12.0, 20.0), {"name": "train", "ts": 0, "dur": 99e6}]
    assert Steady.of(events, warmup_updates=2) == Steady(start_s=12.0, end_s=20.0)


@pytest.mark.parametrize("warmup", [0, 4, 5])
def test_steady_state_without_an_update_is_refused(warmup):
    with pytest.raises(ValueError, match="4 updates have no steady state"):
        Steady.of(applied(1.0, 2.0, 3.0, 4.0), warmup_updates=warmup)


def test_mean_running_weighs_each_look_by_the_time_to_the_next_one_inside_the_stretch():
    # 32 for one second of the stretch (2 to 3), 16 for two, 8 for the last one; what is outside doesn't count.
    seen = [(0.0, 32), (3.0, 16), (5.0, 8), (9.0, 99)]
    assert mean_running(seen, Steady(start_s=2.0, end_s=6.0)) == pytest.approx((32 * 1 + 16 * 2 + 8 * 1) / 4)


def test_mean_running_where_nobody_looked_is_refused():
    with pytest.raises(ValueError, match="no look at the engine"):
        mean_running([(0.0, 1), (1.0, 2)], Steady(start_s=2.0, end_s=3.0))


def test_load_log_notes_what_runs_until_it_is_ended(monkeypatch):
    numbers = iter(range(100))
    monkeypatch.setattr(load, "LOOK_S", 0.0)

    async def scenario() -> LoadLog:
        log = LoadLog(lambda: SimpleNamespace(num_running=next(numbers)))  # pyright: ignore[reportArgumentType]
        watching = asyncio.create_task(log.watch())
        while len(log.seen) < 5:
            await asyncio.sleep(0)
        watching.cancel()
        return log

    seen = asyncio.run(scenario()).seen
    assert [running for _, running in seen][:5] == [0, 1, 2, 3, 4]
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
