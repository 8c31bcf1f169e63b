import asyncio
import contextlib
import dataclasses
import json

import pytest

from actor.environments.environment_pool import EnvironmentPool, check_environments
from actor.environments.protocol import EpisodeError
from bridge.rollout_types import MAX_ABS_REWARD
from configs.sections.actor import EnvironmentsConfig
from tests.actor.fakes import until
from tests.integration.support.jobs import is_alive

MODULE = "tests.actor.environments.bad_environments"
OWN = tuple(f"{MODULE}:{name}" for name in ("Bad", "Unreal", "Later", "Chance", "NoStep"))
BAD = f"{MODULE}:Bad"
GUESS = {"answer": "7", "low": 0, "high": 9, "max_guesses": 4, "possible_reward": 0.0, "style": "short"}


@contextlib.asynccontextmanager
async def opened():
    """A pool, which is closed at the end."""
    pool = EnvironmentPool(EnvironmentsConfig(call_timeout_s=60.0, max_processes=256), own=OWN)
    try:
        yield pool
    finally:
        await pool.close()


def impatient(pool: EnvironmentPool) -> None:
    pool._config = EnvironmentsConfig(call_timeout_s=0.5)


async def where(process) -> tuple[int, int]:
    """The pids of an episode's process and of its zygote."""
    pid, parent = (await process.step("where")).messages[0]["content"].split()
    return int(pid), int(parent)


async def idle(pool: EnvironmentPool) -> None:
    await until(lambda: pool.num_running == 0, "all processes have ended")


async def test_step_answers_of_an_episode_come_in_order():
    async with opened() as pool:
        async with pool.open("guess") as process:
            assert (await process.reset(GUESS)).messages == []
            said = [await process.step(guess) for guess in ("3", "8", "7")]
        assert [s.messages[0]["content"] for s in said[:2]] == [">:", "<:"]
        assert [(s.reward, s.done) for s in said] == [(0.0, False), (0.0, False), (1.0, True)]
        await idle(pool)


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
async def test_environment_that_fails_is_an_error_and_its_process_is_gone(at, how, kind, said):
    async with opened() as pool:
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
        assert not any(map(is_alive, pids))
        assert pool.failures == {kind: 1}
        pool._config = EnvironmentsConfig()
        async with pool.open(BAD) as process:  # the next one is as good as any
            await process.reset({})
            assert (await process.step("x")).reward == 0.5


@pytest.mark.parametrize("answer", ["nan", "1e39", "-2e6", "text", "messages", "huge", "surrogate"])
async def test_answer_that_is_none_is_an_error_and_no_reward(answer):
    async with opened() as pool:
        with pytest.raises(EpisodeError):
            async with pool.open(f"{MODULE}:Unreal") as process:
                await process.reset({})
                await process.step(answer)


async def test_largest_reward_that_a_learner_takes_is_one():
    async with opened() as pool, pool.open(f"{MODULE}:Unreal") as process:
        await process.reset({})
        assert (await process.step("1e6")).reward == MAX_ABS_REWARD == 1e6


async def test_info_that_msgpack_has_no_form_for_becomes_text():
    async with opened() as pool:
        async with pool.open(f"{MODULE}:Unreal") as process:
            await process.reset({})
            info = (await process.step("ok")).info
        assert "object object at" in info["object"]
        assert str(2**70) in info["huge"] and "ud800" in info["surrogate"]
        assert info["plain"] == {"a": [1, 0.5, None]}
        assert info["keys"] == {(1, 2): 3}


async def test_row_comes_to_its_environment_as_it_is():
    row = {"big": 2**70, "least": -(2**63) - 1, "half": "\ud800", "real": 0.1, "list": [None, True, {"é": []}]}
    async with opened() as pool, pool.open(BAD) as process:
        await process.reset(row)
        assert json.loads((await process.step("row")).messages[0]["content"]) == row


async def test_row_that_has_no_text_is_a_final_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    async with opened() as pool:
        with pytest.raises(EpisodeError, match="cannot be serialized as JSON: RecursionError") as e:
            async with pool.open(BAD) as process:
                await process.reset({"deep": deep})
        assert e.value.is_final


async def test_asynchronous_environment_keeps_its_loop():
    async with opened() as pool, pool.open(f"{MODULE}:Later") as process:
        await process.reset({})
        assert (await process.step("ab")).messages[0]["content"] == "AB"
        assert (await process.step("cd")).messages[0]["content"] == "CD"


@pytest.mark.heavy
async def test_two_hundred_episodes_of_which_one_hangs_are_held_up_by_none():
    async with opened() as pool:
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


async def test_environment_of_somebodys_own_that_was_not_allowed_imports_nothing(tmp_path, monkeypatch):
    """A ticket names the environment, and whoever writes tickets must not make an actor run code."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nclass E: ...\n")
    monkeypatch.chdir(tmp_path)
    async with opened() as pool:
        with pytest.raises(EpisodeError, match="theirs:E is custom code") as e:
            async with pool.open("theirs:E"):
                pass
        assert e.value.is_final
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", "no environment 'nope'; expected one of calculator, guess, textarena"),
        (f"{MODULE}:NoStep", "NoStep has no step"),
    ],
)
async def test_environment_that_can_not_be_loaded_is_a_final_error(name, said):
    async with opened() as pool:
        with pytest.raises(EpisodeError, match=said) as e:
            await pool.load(name)
        assert e.value.is_final


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
