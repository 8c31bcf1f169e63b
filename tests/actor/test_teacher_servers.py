"""Teachers on servers: what is asked of a vLLM server, how its answers are read, and where they go."""

import asyncio
import contextlib
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from msgspec import UNSET, UnsetType

from actor import teacher_servers
from actor.background import shut_down
from actor.engine_protocol import Sample
from actor.rewards.verifier_pool import VerifierError
from actor.teacher_servers import TeacherServers
from bridge.rollout_types import Rollout, Version
from bridge.text.text_tokens import read_tokenizer
from launch.startup.warmup import write_character_tokenizer
from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup, make_setup_beside
from tests.bridge.factories import make_ticket

TOKENS = np.array([5, 7, 5], np.int32)
SAMPLE = Sample(
    tokens=TOKENS, logprobs=np.zeros(3, np.float32), token_versions=(Version(incarnation=0, step=0),) * 3, finish="stop"
)
TICKET = make_ticket(prompt_tokens=np.array([3, 4], np.int32))


def logprob(tokens, i):
    """A teacher that reads all tokens up to a position."""
    return -0.25 - sum((j + 1) * t for j, t in enumerate(tokens[: i + 1])) % 7


class Server:
    """Answers of a vLLM server; `failures` come first, and `spoil` changes the answer."""

    def __init__(self, *, tokenizer: Any = None, max_model_len: int | None = 64, failures=(), spoil=lambda told: told):
        self.tokenizer, self.max_model_len, self.failures, self.spoil = tokenizer, max_model_len, [*failures], spoil
        self.asked = []

    async def completions(self, request):
        body = await request.json()
        self.asked.append(body)
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="not now")
        tokens = body["prompt"]
        assert (body["max_tokens"], body["prompt_logprobs"]) == (1, 0)
        rows = [{str(t): {"logprob": logprob(tokens, i), "rank": 1}} for i, t in enumerate(tokens)]
        reply = self.spoil(json.dumps({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]}))
        return web.Response(body=reply if isinstance(reply, bytes) else reply.encode())

    async def tokenize(self, request):
        text = (await request.json())["prompt"]
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return web.json_response({"tokens": tokens, "max_model_len": self.max_model_len})

    @contextlib.asynccontextmanager
    async def running(self, base="", **options):
        app = web.Application()
        app.router.add_post(f"{base}/v1/completions", self.completions)
        app.router.add_post(f"{base}/tokenize", self.tokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = TeacherServers({"": ("loss.teacher_url", f"http://127.0.0.1:{port}{base}/v1/")}, **options)
        try:
            yield client
        finally:
            await client.close()
            await runner.cleanup()


def asked_of(server, *, sample=SAMPLE, of=TICKET, **options):
    async def body():
        async with server.running(**options) as client:
            return await client.score(of, sample)

    return asyncio.run(body())


def logprobs_of(found: Sample | Rollout) -> np.ndarray:
    assert not isinstance(found.teacher_logprobs, UnsetType)
    return found.teacher_logprobs


WANT = [logprob([3, 4, *TOKENS], i) for i in (2, 3, 4)]


@pytest.mark.parametrize("base", ["", "/teacher"])
def test_logprobs_are_those_of_the_response_after_its_prompt(base):
    server = Server()
    found = asked_of(server, base=base)
    assert logprobs_of(found).tolist() == WANT and logprobs_of(found).dtype == np.float32
    assert dataclasses.replace(found, teacher_logprobs=SAMPLE.teacher_logprobs) == SAMPLE
    assert [body["prompt"] for body in server.asked] == [[3, 4, *TOKENS]]


@pytest.mark.parametrize(
    "of",
    [
        dataclasses.replace(TICKET, kind="eval"),
        dataclasses.replace(TICKET, kind="probe"),
        dataclasses.replace(TICKET, task=dataclasses.replace(TICKET.task, teacher="in_the_learner")),
    ],
    ids=["eval", "probe", "other teacher"],
)
def test_sample_without_a_teacher_on_a_server_is_asked_of_none(of):
    server = Server()
    assert asked_of(server, of=of) is SAMPLE and not server.asked


def test_server_that_is_overloaded_is_asked_again(monkeypatch):
    monkeypatch.setattr(teacher_servers, "FIRST_BACKOFF_S", 0.0)
    server = Server(failures=[503, 429])
    assert logprobs_of(asked_of(server)).tolist() == WANT
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server(spoil=lambda _: b"\xe9 is Latin-1"), "expected a JSON object"),
        (Server(failures=[400]), r"loss.teacher_url=http://127.0.0.1:\d+/v1/: status 400: not now"),
        (Server(failures=[503]), r"status 503: not now \(retried for 0 s\)"),
        (Server(failures=[307]), "status 307"),
        (Server(spoil=lambda told: told[:-5]), "expected a JSON object"),
        (Server(spoil=lambda told: "[1]"), "expected a JSON object"),
        (Server(spoil=lambda told: told.replace("prompt_logprobs", "x")), "expected prompt_logprobs of vLLM"),
        (Server(spoil=lambda told: told.replace('"7":', '"8":')), "expected prompt_logprobs of vLLM"),
        (Server(spoil=lambda told: told.replace("[null, ", "[")), "expected prompt_logprobs of vLLM"),
        (
            Server(spoil=lambda told: told.replace(f"{WANT[1]}", "-9999.0")),
            "expected logprobs in nats, got values from -9999",
        ),
        (Server(spoil=lambda told: told.replace(f"{WANT[1]}", "3.5")), "to 3.5; serve .* --logprobs-mode=raw_logprobs"),
        (Server(spoil=lambda told: told.replace(f"{WANT[1]}", "NaN")), "expected logprobs in nats"),
    ],
    ids=[
        "not UTF-8",
        "refused",
        "gone",
        "redirected",
        "cut",
        "list",
        "no logprobs",
        "other token",
        "shorter",
        "no probability",
        "logits",
        "no number",
    ],
)
def test_answer_that_is_no_logprobs_is_an_error(server, said):
    with pytest.raises(VerifierError, match=said):
        asked_of(server, retry_s=0)


async def test_server_that_is_not_there_is_an_error(tmp_path):
    write_character_tokenizer(tmp_path)
    client = TeacherServers({"": ("loss.teacher_url", "http://127.0.0.1:9/v1")}, retry_s=0)
    # Other than a wrong server, which a restart does not mend.
    with pytest.raises(TimeoutError, match="loss.teacher_url=http://127.0.0.1:9/v1: .*Start the server before the run"):
        await client.check(read_tokenizer(tmp_path), 8)
    await client.close()


async def test_server_is_checked_for_the_tokens_and_the_context_of_the_run(tmp_path):
    write_character_tokenizer(tmp_path)
    own = read_tokenizer(tmp_path)

    class Other:
        def encode(self, text, add_special_tokens):
            return own.encode(text[::-1], add_special_tokens=add_special_tokens)

    only_added = own.get_added_tokens_decoder().keys() - set(own.encode(teacher_servers.PROBE_TEXT).ids)

    class OtherSpecial:
        def encode(self, text, add_special_tokens):
            ids = own.encode(text, add_special_tokens=add_special_tokens).ids
            return SimpleNamespace(ids=[token + (token in only_added) for token in ids])

    async def check(server, max_tokens):
        async with server.running() as client:
            await client.check(own, max_tokens)

    good = Server(tokenizer=own, max_model_len=65)
    await check(good, 64)
    assert len(good.asked) == 1 and len(good.asked[0]["prompt"]) == 64
    with pytest.raises(ValueError, match="expected prompt_logprobs of vLLM"):
        await check(Server(tokenizer=own, max_model_len=65, spoil=lambda _: "{}"), 64)
    with pytest.raises(ValueError, match="got None"):
        await check(Server(tokenizer=own, max_model_len=None), 64)
    with pytest.raises(ValueError, match=r"--max-model-len above model.max_tokens \(64\), got 64"):
        await check(Server(tokenizer=own, max_model_len=64), 64)
    with pytest.raises(ValueError, match="expected the policy's tokenizer"):
        await check(Server(tokenizer=Other(), max_model_len=65), 64)
    with pytest.raises(ValueError, match="expected the policy's tokenizer"):
        await check(Server(tokenizer=OtherSpecial(), max_model_len=65), 64)


async def test_stored_group_has_its_teachers_logprobs_and_an_evaluation_none(tmp_path):
    server = Server()
    async with server.running() as client:
        s = make_setup(tmp_path, auto=True, teachers=client)
        s.publish(0)
        s.put(0, prompt_tokens=np.array([3, 4], np.int32))
        s.put(-1, kind="eval")
        async with s.serving():
            await until(lambda: s.groups() and s.groups("eval"), "both groups")
    (group,), (evaluation,) = s.groups(), s.groups("eval")
    tokens = [3, 4, *group.rollouts[0].tokens]
    assert [logprobs_of(r).tolist() for r in group.rollouts] == [[logprob(tokens, 2), logprob(tokens, 3)]] * 2
    assert [r.teacher_logprobs for r in evaluation.rollouts] == [UNSET] * 2


async def test_next_actor_asks_the_teacher_of_responses_whose_rewards_it_received(tmp_path):
    server = Server()
    async with server.running() as client:
        s = make_setup(tmp_path, teachers=client)
        s.publish(0)
        s.put(0)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            s.engine.step("t0.1", 3)
            s.engine.finish("t0.1")
            await until(lambda: len(server.asked) == 1, "the teacher was asked")
            await s.runs("t0.0")
            await shut_down(s.actor)
        other = make_setup_beside(s, "actor-1")
        other.actor.serving.teachers = client
        async with other.serving():
            await other.runs("t0.0")
            other.engine.finish("t0.0")
            await until(lambda: bool(other.groups()), "the group")
    (group,) = other.groups()
    assert [logprobs_of(r).size for r in group.rollouts] == [2, 3]
    await s.rewards.close()


async def test_reward_is_handed_over_while_the_teacher_is_asked(tmp_path):
    class Waiting(TeacherServers):
        def __init__(self):
            super().__init__({})
            self.asked = asyncio.Event()

        async def score(self, ticket, sample):
            self.asked.set()
            await asyncio.Event().wait()
            return sample

    waiting = Waiting()
    s = make_setup(tmp_path, teachers=waiting)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.1", 3)
        s.engine.finish("t0.1")
        await waiting.asked.wait()
        await shut_down(s.actor)
    (ticket,) = s.store.claim("reader", limit=1, lease_s=60)
    assert ticket.progress is not None
    assert {r.index: r.reward is not None for r in ticket.progress.requests}[1]


async def test_ticket_whose_teacher_refuses_is_replaced_after_its_attempts(tmp_path):
    server = Server(failures=[400] * 100)
    async with server.running() as client:
        s = make_setup(tmp_path, auto=True, teachers=client)
        s.publish(0)
        s.put(0)
        async with s.serving():
            await until(lambda: bool(s.store.failed()), "the ticket failed")
    assert "loss.teacher_url" in s.store.failed()["t0"] and "status 400" in s.store.failed()["t0"]
    assert s.groups() == []
