"""Processes of environments: their ends, what they hold, and what they cannot see."""

import asyncio
import contextlib
import os
import signal

import pytest

from actor.environments import environment_pool as pools
from actor.environments import fork_server_client
from actor.environments.environment_pool import EnvironmentPool
from actor.environments.protocol import EpisodeError
from configs.sections.actor import EnvironmentsConfig
from tests.actor.environments.test_environment_pool import (
    BAD,
    GUESS,
    MODULE,
    OWN,
    idle,
    impatient,
    opened,
    where,
)
from tests.actor.fakes import until
from tests.integration.support.jobs import is_alive


async def test_killed_child_hits_its_own_episode_only():
    async with opened() as pool, pool.open(BAD) as other:
        await other.reset({})
        with pytest.raises(EpisodeError, match="process crashed"):
            async with pool.open(BAD) as process:
                await process.reset({})
                os.kill((await where(process))[0], signal.SIGKILL)
                await process.step("x")
        assert (await other.step("still here")).messages[0]["content"] == "still here"


@pytest.mark.heavy
async def test_killed_zygote_takes_its_episodes_along_and_is_replaced():
    async with opened() as pool:
        pids = []
        with pytest.raises(EpisodeError, match="process crashed"):
            async with pool.open(BAD) as process:
                await process.reset({})
                pids += await where(process)
                os.kill(pids[1], signal.SIGKILL)
                await until(lambda: not any(map(is_alive, pids)), "zygote and child have ended")
                await process.step("x")
        await idle(pool)
        async with pool.open(BAD) as process:
            await process.reset({})
            assert (await where(process))[1] != pids[1]


@pytest.mark.parametrize("is_closed", [False, True])
async def test_what_an_environment_started_ends_with_it_or_with_the_pool(tmp_path, is_closed):
    async with opened() as pool:
        await pool.load(BAD)
        impatient(pool)
        pids = tmp_path / "pids"

        def started() -> list[int]:
            return [int(p) for p in pids.read_text().split()] if pids.exists() else []

        task = asyncio.create_task(_only_reset(pool, {"how": "spawn", "at": "reset", "pids": str(pids)}))
        pool._config = EnvironmentsConfig(call_timeout_s=60.0)
        await until(lambda: len(started()) == 2, "it has started two")
        if is_closed:
            await pool.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EpisodeError):
            await task
        await idle(pool)
        await until(lambda: not any(map(is_alive, started())), "both are gone")


HELPED = """
import subprocess, sys
from actor.environments.protocol import Step

ECHO = "import sys\\nfor line in sys.stdin: print(line, end='', flush=True)"
helper = subprocess.Popen([sys.executable, "-c", ECHO], stdin=-1, stdout=-1, text=True)

class Helped:
    def reset(self, row):
        return [{"role": "user", "content": str(helper.pid)}]

    def step(self, action):
        print(action, file=helper.stdin, flush=True)
        return Step(messages=[{"role": "user", "content": helper.stdout.readline().strip()}], reward=0.0, done=True)

    def close(self):
        pass
"""


async def test_process_that_an_environments_module_started_serves_all_episodes_and_ends_with_the_pool(
    tmp_path, monkeypatch
):
    (tmp_path / "helped.py").write_text(HELPED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pids = []
    pool = EnvironmentPool(EnvironmentsConfig(call_timeout_s=60.0), own=["helped:Helped"])
    for word in ("one", "two"):
        async with pool.open("helped:Helped") as process:
            pids.append(int((await process.reset({})).messages[0]["content"]))
            assert (await process.step(word)).messages[0]["content"] == word
        await idle(pool)
    await pool.close()
    await until(lambda: not is_alive(pids[0]), "the helper has ended")
    assert pids[0] == pids[1]


async def _only_reset(pool, row):
    async with pool.open(BAD) as process:
        await process.reset(row)


async def test_cancelled_episode_is_killed():
    async with opened() as pool:
        begun = asyncio.Event()
        pids = []

        async def play():
            async with pool.open(BAD) as process:
                start = await process.reset({"how": "hang", "at": "step"})
                pids.append(int(start.messages[0]["content"].removeprefix("pid ")))
                begun.set()
                await process.step("x")

        task = asyncio.create_task(play())
        await begun.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await idle(pool)
        assert not is_alive(pids[0])


async def test_end_in_order_lets_the_environment_close(tmp_path):
    async with opened() as pool:
        async with pool.open(BAD) as process:
            await process.reset({"closed": str(tmp_path / "closed")})
        await idle(pool)
        assert (tmp_path / "closed").exists()


@pytest.mark.heavy
async def test_environment_that_does_not_close_is_killed(monkeypatch):
    monkeypatch.setattr(pools, "CLOSE_TIMEOUT_S", 0.2)
    async with opened() as pool:
        async with pool.open(BAD) as process:
            await process.reset({"how": "hang", "at": "close"})
            pid, _ = await where(process)
        await idle(pool)
        assert not is_alive(pid)


@pytest.mark.parametrize("bound", [1, 2])
async def test_open_beyond_the_bound_waits_in_order(bound):
    small = EnvironmentPool(EnvironmentsConfig(max_processes=bound), own=OWN)
    order: list[int] = []
    may_end = [asyncio.Event() for _ in range(5)]

    async def play(i: int):
        async with small.open(BAD) as process:
            await process.reset({})
            order.append(i)
            await may_end[i].wait()

    tasks = [asyncio.create_task(play(i)) for i in range(5)]
    try:
        for i in range(5):
            await until(lambda i=i: len(order) >= min(5, i + bound), "as many play as may")
            assert small.num_running <= bound
            may_end[i].set()
            await tasks[i]
        # Of two that may begin at once either can be first.
        assert all(abs(place - i) < bound for place, i in enumerate(order))
    finally:
        await small.close()


async def play_guess(pool: EnvironmentPool) -> None:
    async with pool.open("guess") as process:
        await process.reset(GUESS)


@pytest.mark.heavy
async def test_environment_that_hangs_does_not_hold_up_another():
    pool = EnvironmentPool(EnvironmentsConfig(max_processes=4), own=OWN, names=(BAD, "guess"))
    hanging = [asyncio.create_task(_only_reset(pool, {"how": "hang", "at": "reset"})) for _ in range(4)]
    try:
        await until(lambda: pool.num_running >= 3, "all that may hang")
        await asyncio.wait_for(play_guess(pool), 60)
    finally:
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        await pool.close()


async def test_environment_that_is_imported_still_holds_no_place(monkeypatch):
    pool = EnvironmentPool(EnvironmentsConfig(max_processes=1), own=OWN)
    await pool.load("guess")
    importing = asyncio.Event()

    async def start(*args, **kwargs):
        importing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fork_server_client.ForkServerClient, "start", start)
    waiting = asyncio.create_task(_only_reset(pool, {}))
    await importing.wait()
    await asyncio.wait_for(play_guess(pool), 60)
    waiting.cancel()
    await asyncio.wait([waiting])
    await pool.close()


async def test_close_ends_zygotes_and_episodes():
    async with opened() as pool:
        pids = []

        async def play():
            async with pool.open(BAD) as process:
                await process.reset({})
                pids.extend(await where(process))
                await asyncio.Event().wait()

        task = asyncio.create_task(play())
        await until(lambda: len(pids) == 2, "it plays")
        await pool.close()
        await until(lambda: not any(map(is_alive, pids)), "both have ended")
        task.cancel()


async def test_episode_process_has_no_secrets_and_no_framework(monkeypatch):
    for name in ("SLUICE_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"):
        monkeypatch.setenv(name, "s" * 40)
    async with opened() as pool, pool.open(BAD) as process:
        await process.reset({})
        assert (await process.step("secret")).messages[0]["content"] == "[]"
        assert (await process.step("modules")).messages[0]["content"] == "[]"


async def test_forks_differ_by_chance_and_zygotes_not_by_hash():
    async with opened() as pool:

        async def once() -> list[str]:
            async with pool.open(f"{MODULE}:Chance") as process:
                return (await process.reset({})).messages[0]["content"].split()

        first, second = await once(), await once()
        await pool.close()  # the next comes from another zygote, as on another actor
        third = await once()
        for chance in (0, 1):  # Python's and numpy's
            assert len({one[chance] for one in (first, second, third)}) == 3
        assert first[2] == second[2] == third[2]
