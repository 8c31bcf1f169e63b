import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal

import pytest

from actor.environments import environment_pool as pools
from actor.environments import fork_server_client
from actor.environments.environment_pool import EnvironmentPool, check_environments
from actor.environments.protocol import EpisodeError
from bridge.rollout_types import MAX_ABS_REWARD
from configs.sections.actor import EnvironmentsConfig
from tests.actor.fakes import until

MODULE = "tests.actor.environments.bad_environments"
OWN = tuple(f"{MODULE}:{name}" for name in ("Bad", "Unreal", "Later", "Chance", "NoStep"))
BAD = f"{MODULE}:Bad"
GUESS = {"answer": "7", "low": 0, "high": 9, "max_guesses": 4, "possible_reward": 0.0, "style": "short"}


def run(body):
    """Runs a test with a pool, which is closed; `body` takes it."""

    async def with_pool():
        config = EnvironmentsConfig(call_timeout_s=60.0, max_processes=256)
        pool = EnvironmentPool(config, own=OWN)
        try:
            await body(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(with_pool(), 240))


def impatient(pool: EnvironmentPool) -> None:
    pool._config = EnvironmentsConfig(call_timeout_s=0.5)


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def where(process) -> tuple[int, int]:
    """The pids of an episode's process and of its zygote."""
    pid, parent = (await process.step("where")).messages[0]["content"].split()
    return int(pid), int(parent)


async def idle(pool: EnvironmentPool) -> None:
    await until(lambda: pool.num_running == 0, "all processes have ended")


def test_step_answers_of_an_episode_come_in_order():
    async def body(pool):
        async with pool.open("guess") as process:
            assert (await process.reset(GUESS)).messages == []
            said = [await process.step(guess) for guess in ("3", "8", "7")]
        assert [s.messages[0]["content"] for s in said[:2]] == [">:", "<:"]
        assert [(s.reward, s.done) for s in said] == [(0.0, False), (0.0, False), (1.0, True)]
        await idle(pool)

    run(body)


@pytest.mark.heavy
@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("hang", "deadline", "no answer to .* after 0.5 s"),
        ("sleep", "deadline", "no answer to .* after 0.5 s"),
        ("crash", "crash", "process crashed"),
        ("exit", "exception", "SystemExit: 3"),
        ("raise", "exception", "RuntimeError: broken"),
        ("memory", "exception", "MemoryError"),
    ],
)
def test_environment_that_fails_is_an_error_and_its_process_is_gone(at, how, kind, said):
    async def body(pool):
        await pool.load(BAD)
        if kind == "deadline":
            impatient(pool)
        pids = []
        with pytest.raises(EpisodeError, match=said):
            async with pool.open(BAD) as process:
                start = await process.reset({"how": how, "at": at})
                pids.append(int(start.messages[0]["content"].removeprefix("pid ")))
                await process.step("x")
        await idle(pool)
        assert not any(map(is_running, pids))
        assert pool.failures == {kind: 1}
        pool._config = EnvironmentsConfig()
        async with pool.open(BAD) as process:  # the next one is as good as any
            await process.reset({})
            assert (await process.step("x")).reward == 0.5

    run(body)


@pytest.mark.parametrize("answer", ["nan", "1e39", "-2e6", "text", "messages", "huge", "surrogate"])
def test_answer_that_is_none_is_an_error_and_no_reward(answer):
    async def body(pool):
        with pytest.raises(EpisodeError):
            async with pool.open(f"{MODULE}:Unreal") as process:
                await process.reset({})
                await process.step(answer)

    run(body)


def test_largest_reward_that_a_learner_takes_is_one():
    async def body(pool):
        async with pool.open(f"{MODULE}:Unreal") as process:
            await process.reset({})
            assert (await process.step("1e6")).reward == MAX_ABS_REWARD == 1e6

    run(body)


def test_info_that_msgpack_has_no_form_for_becomes_text():
    async def body(pool):
        async with pool.open(f"{MODULE}:Unreal") as process:
            await process.reset({})
            info = (await process.step("ok")).info
        assert "object object at" in info["object"]
        assert str(2**70) in info["huge"] and "ud800" in info["surrogate"]
        assert info["plain"] == {"a": [1, 0.5, None]}
        assert info["keys"] == {(1, 2): 3}

    run(body)


def test_row_comes_to_its_environment_as_it_is():
    row = {"big": 2**70, "least": -(2**63) - 1, "half": "\ud800", "real": 0.1, "list": [None, True, {"é": []}]}

    async def body(pool):
        async with pool.open(BAD) as process:
            await process.reset(row)
            assert json.loads((await process.step("row")).messages[0]["content"]) == row

    run(body)


def test_row_that_has_no_text_is_a_final_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]

    async def body(pool):
        with pytest.raises(EpisodeError, match="cannot be serialized as JSON: RecursionError") as e:
            async with pool.open(BAD) as process:
                await process.reset({"deep": deep})
        assert e.value.is_final

    run(body)


def test_asynchronous_environment_keeps_its_loop():
    async def body(pool):
        async with pool.open(f"{MODULE}:Later") as process:
            await process.reset({})
            assert (await process.step("ab")).messages[0]["content"] == "AB"
            assert (await process.step("cd")).messages[0]["content"] == "CD"

    run(body)


@pytest.mark.heavy
def test_two_hundred_episodes_of_which_one_hangs_are_held_up_by_none():
    async def body(pool):
        await pool.load(BAD)
        begun = asyncio.Event()

        async def hang():
            async with pool.open(BAD) as process:
                await process.reset({"how": "hang", "at": "step"})
                begun.set()
                await process.step("x")

        async def play():
            async with pool.open(BAD) as process:
                await process.reset({})
                return [(await process.step(str(i))).messages[0]["content"] for i in range(3)]

        stuck = asyncio.create_task(hang())
        await begun.wait()
        assert await asyncio.gather(*(play() for _ in range(199))) == [["0", "1", "2"]] * 199
        assert not stuck.done()
        stuck.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stuck
        await idle(pool)
        assert pool.failures == {}

    run(body)


def test_killed_child_hits_its_own_episode_only():
    async def body(pool):
        async with pool.open(BAD) as other:
            await other.reset({})
            with pytest.raises(EpisodeError, match="process crashed"):
                async with pool.open(BAD) as process:
                    await process.reset({})
                    os.kill((await where(process))[0], signal.SIGKILL)
                    await process.step("x")
            assert (await other.step("still here")).messages[0]["content"] == "still here"

    run(body)


@pytest.mark.heavy
def test_killed_zygote_takes_its_episodes_along_and_is_replaced():
    async def body(pool):
        pids = []
        with pytest.raises(EpisodeError, match="process crashed"):
            async with pool.open(BAD) as process:
                await process.reset({})
                pids += await where(process)
                os.kill(pids[1], signal.SIGKILL)
                await until(lambda: not any(map(is_running, pids)), "zygote and child have ended")
                await process.step("x")
        await idle(pool)
        async with pool.open(BAD) as process:
            await process.reset({})
            assert (await where(process))[1] != pids[1]

    run(body)


def test_what_an_environment_started_ends_with_it(tmp_path):
    async def body(pool):
        await pool.load(BAD)
        impatient(pool)
        pids = tmp_path / "pids"

        def started() -> list[int]:
            return [int(p) for p in pids.read_text().split()] if pids.exists() else []

        task = asyncio.create_task(_only_reset(pool, {"how": "spawn", "at": "reset", "pids": str(pids)}))
        pool._config = EnvironmentsConfig(call_timeout_s=60.0)
        await until(lambda: len(started()) == 2, "it has started two")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await idle(pool)
        await until(lambda: not any(map(is_running, started())), "both are gone")

    run(body)


async def _only_reset(pool, row):
    async with pool.open(BAD) as process:
        await process.reset(row)


def test_cancelled_episode_is_killed():
    async def body(pool):
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
        assert not is_running(pids[0])

    run(body)


def test_end_in_order_lets_the_environment_close(tmp_path):
    async def body(pool):
        async with pool.open(BAD) as process:
            await process.reset({"closed": str(tmp_path / "closed")})
        await idle(pool)
        assert (tmp_path / "closed").exists()

    run(body)


@pytest.mark.heavy
def test_environment_that_does_not_close_is_killed(monkeypatch):
    monkeypatch.setattr(pools, "CLOSE_TIMEOUT_S", 0.2)

    async def body(pool):
        async with pool.open(BAD) as process:
            await process.reset({"how": "hang", "at": "close"})
            pid, _ = await where(process)
        await idle(pool)
        assert not is_running(pid)

    run(body)


@pytest.mark.parametrize("bound", [1, 2])
def test_open_beyond_the_bound_waits_in_order(bound):
    async def body(pool):
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

    run(body)


async def play_guess(pool: EnvironmentPool) -> None:
    async with pool.open("guess") as process:
        await process.reset(GUESS)


@pytest.mark.heavy
def test_environment_that_hangs_does_not_hold_up_another():
    async def body(_):
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

    run(body)


def test_environment_that_is_imported_still_holds_no_place(monkeypatch):
    async def body(_):
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

    run(body)


def test_close_ends_zygotes_and_episodes():
    async def body(pool):
        pids = []

        async def play():
            async with pool.open(BAD) as process:
                await process.reset({})
                pids.extend(await where(process))
                await asyncio.Event().wait()

        task = asyncio.create_task(play())
        await until(lambda: len(pids) == 2, "it plays")
        await pool.close()
        await until(lambda: not any(map(is_running, pids)), "both have ended")
        task.cancel()

    run(body)


def test_episode_process_has_no_secrets_and_no_framework(monkeypatch):
    for name in ("SLUICE_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"):
        monkeypatch.setenv(name, "s" * 40)

    async def body(pool):
        async with pool.open(BAD) as process:
            await process.reset({})
            assert (await process.step("secret")).messages[0]["content"] == "[]"
            assert (await process.step("modules")).messages[0]["content"] == "[]"

    run(body)


def test_forks_differ_by_chance_and_zygotes_not_by_hash():
    async def body(pool):
        async def once() -> list[str]:
            async with pool.open(f"{MODULE}:Chance") as process:
                return (await process.reset({})).messages[0]["content"].split()

        first, second = await once(), await once()
        await pool.close()  # the next comes from another zygote, as on another actor
        third = await once()
        for chance in (0, 1):  # Python's and numpy's
            assert len({one[chance] for one in (first, second, third)}) == 3
        assert first[2] == second[2] == third[2]

    run(body)


def test_environment_of_somebodys_own_that_was_not_allowed_imports_nothing(tmp_path, monkeypatch):
    """A ticket names the environment, and whoever writes tickets must not make an actor run code."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nclass E: ...\n")
    monkeypatch.chdir(tmp_path)

    async def body(pool):
        with pytest.raises(EpisodeError, match="theirs:E is custom code") as e:
            async with pool.open("theirs:E"):
                pass
        assert e.value.is_final

    run(body)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", "no environment 'nope'; expected one of calculator, guess, textarena"),
        (f"{MODULE}:NoStep", "NoStep has no step"),
    ],
)
def test_environment_that_can_not_be_loaded_is_a_final_error(name, said):
    async def body(pool):
        with pytest.raises(EpisodeError, match=said) as e:
            await pool.load(name)
        assert e.value.is_final

    run(body)


@pytest.mark.heavy
def test_check_environments_says_in_one_line_what_can_not_be_used(tmp_path):
    config = EnvironmentsConfig()
    check_environments([BAD, "guess"], config)
    check_environments([], config)
    with pytest.raises(
        ValueError, match="cannot import module nowhere: ModuleNotFoundError: No module named 'nowhere'"
    ):
        check_environments(["guess", "nowhere:Class"], config)
    with pytest.raises(ValueError, match=f"{tmp_path}/none cannot be started .No such file.*environments.python"):
        check_environments(["verifiers"], dataclasses.replace(config, python=str(tmp_path / "none")))
