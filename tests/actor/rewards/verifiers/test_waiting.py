"""How long a judge is waited for, and when it is asked again, with a clock and a sleep that the test moves."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from actor.rewards.verifier_pool import VerifierError
from actor.rewards.verifiers.judge import BACKOFF_S, MAX_BACKOFF_S, MAX_RETRY_AFTER_S, Judge
from tests.actor.fakes import until
from tests.actor.rewards.verifiers import endpoint_server as endpoint
from tests.actor.rewards.verifiers.test_judge import CONFIG, TASK, Time, judge, response


async def test_retries_are_bounded_and_their_waits_grow_to_a_bound():
    async with endpoint.serving(endpoint.status(503)) as served:
        time = Time()
        one = judge(served, time, retries=8)
        with pytest.raises(VerifierError, match=r"status 503.*\(9 attempts\)"):
            await one.score(response(), TASK)
        assert time.slept_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S]
        assert served.num_requests == 9
        await one.close()


async def test_endpoint_that_takes_no_connection_is_waited_for_as_long_as_a_start_takes_and_then_an_error():
    async with endpoint.serving(endpoint.score(7)) as served:
        gone = served
    time = Time()
    one = judge(gone, time, retries=0, outage_timeout_s=100.0)
    with pytest.raises(VerifierError, match=r"no connection: .*\(asked for 100 s, judge.outage_timeout_s\)"):
        await one.score(response(), TASK)
    assert 200.0 <= time.now_s <= 200.0 + MAX_BACKOFF_S  # the clock began at 100
    assert one.counts.problems == {"no_connection": one.counts.num_requests}
    await one.close()


async def test_judge_that_was_given_up_is_waited_for_no_longer_and_each_error_says_so():
    async with endpoint.serving(endpoint.score(7)) as served:
        gone = served
    time, said = Time(), [""]

    async def sleep(seconds: float) -> None:
        await time.sleep(seconds)
        said[0] = "it died 3 times in a row" if time.now_s > 105.0 else ""

    config = dataclasses.replace(CONFIG, url=gone.url, outage_timeout_s=1000.0)
    one = Judge(config, sleep=sleep, clock=lambda: time.now_s, draw=lambda low, high: high, failure=lambda: said[0])
    assert one.failure() == ""
    for _ in range(2):
        with pytest.raises(VerifierError, match="the judge exited: it died 3 times in a row"):
            await one.score(response(), TASK)
    assert one.failure() == "it died 3 times in a row" and time.now_s < 120.0
    await one.close()


async def test_endpoint_that_is_back_within_its_time_has_used_up_no_retry():
    async with endpoint.serving(endpoint.status(503), endpoint.score(7)) as served:
        url, time = served.url, Time()
        served.url = "http://127.0.0.1:1/v1"  # nobody listens there

        async def sleep(seconds: float) -> None:
            await time.sleep(seconds)
            if time.now_s > 100.0 + 90.0:
                one._config = dataclasses.replace(one._config, url=url)

        one = Judge(
            dataclasses.replace(CONFIG, url=served.url, retries=1, outage_timeout_s=120.0),
            sleep=sleep,
            clock=lambda: time.now_s,
            draw=lambda low, high: high,
        )
        assert (await one.score(response(), TASK)).value == 0.7
        assert one.counts.problems["no_connection"] > 2 and one.counts.problems["status_503"] == 1
        await one.close()


async def test_retry_after_holds_up_all_requests_of_this_judge():
    limited = endpoint.status(429, Retry_After="7")
    async with endpoint.serving(limited, endpoint.score(7)) as served:
        time = Time()
        one = judge(served, time)
        assert (await one.score(response(), TASK)).value == 0.7
        assert time.now_s == 107.0  # the backoff is among them
        one._resume_at_s = time.now_s + 5.0
        await one.score(response(), TASK)
        assert time.now_s == 112.0
        await one.close()


async def test_retry_after_that_was_extended_meanwhile_is_kept():
    async with endpoint.serving(endpoint.score(7)) as served:
        time = Time()

        async def sleep(seconds: float) -> None:
            if not time.slept_s:
                one._resume_at_s = time.now_s + 9.0  # another request was told so
            await time.sleep(seconds)

        one = Judge(dataclasses.replace(CONFIG, url=served.url), sleep=sleep, clock=lambda: time.now_s)
        one._resume_at_s = time.now_s + 5.0
        assert (await one.score(response(), TASK)).value == 0.7
        assert time.slept_s == [5.0, 4.0]
        await one.close()


async def test_retry_after_is_waited_out_without_a_place():
    async with endpoint.serving(endpoint.score(7)) as served:
        time, waits, may_go_on = Time(), asyncio.Event(), asyncio.Event()

        async def sleep(seconds: float) -> None:
            waits.set()
            await may_go_on.wait()

        config = dataclasses.replace(CONFIG, url=served.url, concurrency=1)
        one = Judge(config, sleep=sleep, clock=lambda: time.now_s)
        one._resume_at_s = time.now_s + 5.0
        first = asyncio.create_task(one.score(response(), TASK))
        await waits.wait()
        time.now_s += 5.0  # it is over, and the first one sleeps on
        assert (await asyncio.wait_for(one.score(response(), TASK), 10)).value == 0.7
        assert served.num_requests == 1 and not first.done()
        may_go_on.set()
        assert (await first).value == 0.7
        await one.close()


async def test_retry_after_of_a_request_is_kept_by_one_that_waited_for_its_place():
    go = asyncio.Event()
    limited = endpoint.after(go, endpoint.status(429, Retry_After="7"))
    async with endpoint.serving(limited, endpoint.score(7)) as served:
        time = Time()
        one = judge(served, time, concurrency=1)
        ask, asked_s = one._post, []

        async def noted(body: Mapping[str, Any]) -> str:
            asked_s.append(time.now_s)
            return await ask(body)

        one._post = noted
        asking = [asyncio.create_task(one.score(response(), TASK)) for _ in range(2)]
        await until(lambda: served.num_running == 1, "the first one runs, the other waits for the place")
        go.set()
        await asyncio.gather(*asking)
        assert asked_s[0] == 100.0 and len(asked_s) == 3 and min(asked_s[1:]) >= 107.0
        await one.close()


async def test_retry_after_is_bounded():
    async with endpoint.serving(endpoint.status(429, Retry_After="86400"), endpoint.score(7)) as served:
        time = Time()
        one = judge(served, time)
        await one.score(response(), TASK)
        assert time.now_s == 100.0 + MAX_RETRY_AFTER_S
        await one.close()


async def test_wait_is_drawn_between_nothing_and_its_bound():
    async with endpoint.serving(endpoint.status(500), endpoint.score(7)) as served:
        drawn: list[tuple[float, float]] = []
        time = Time()
        one = Judge(
            dataclasses.replace(CONFIG, url=served.url),
            sleep=time.sleep,
            clock=lambda: time.now_s,
            draw=lambda low, high: drawn.append((low, high)) or 0.25,
        )
        await one.score(response(), TASK)
        assert drawn == [(0.0, BACKOFF_S)] and time.slept_s == [0.25]
        await one.close()


async def test_request_that_waits_to_be_tried_again_takes_no_place():
    async with endpoint.serving(endpoint.status(500), endpoint.score(7)) as served:
        may_retry, waits = asyncio.Event(), asyncio.Event()

        async def sleep(seconds: float) -> None:
            waits.set()
            await may_retry.wait()

        one = Judge(dataclasses.replace(CONFIG, url=served.url, concurrency=1), sleep=sleep)
        first = asyncio.create_task(one.score(response(), TASK))
        await waits.wait()
        assert (await one.score(response(), TASK)).value == 0.7
        may_retry.set()
        assert (await first).value == 0.7
        await one.close()
