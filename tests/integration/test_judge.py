"""A colocated judge with the real vLLM: a process with a key of its own, which scores, comes back, and ends with us."""

import asyncio
import dataclasses
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actor.rewards.types import Response, Score
from actor.rewards.verifier_pool import VerifierError
from actor.rewards.verifiers import judge
from actor.rewards.verifiers.judge import Judge
from bridge.rollout_types import Task
from configs.presets.rolloutpipe import rolloutpipe
from configs.sections.rewards import JudgeConfig
from launch.services.judge_server import JudgeService
from launch.startup.tiny_model import cached_tiny_model
from launch.supervision.process_tree import descendants
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine]

START_S = 400.0
# The tiny model answers sums; its score is the first digit of that.
CONFIG = JudgeConfig(
    colocate=True,
    model="the fixture's",
    system_prompt="",
    template="{response}\n{question}",
    parser="regex",
    pattern=r"^\D*(\d)",
    max_tokens=64,
    engine={"max_model_tokens": 512, "max_num_seqs": 4},
    retries=0,
)
UNREADABLE = {"no_match", "cut_off"}
TASK = Task.judged_by("judge", answer="7", metadata='{"question": "3 + 4 ="}')


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeService]:
    root = tmp_path_factory.mktemp("judge")
    model = root / "model"
    shutil.copytree(cached_tiny_model(rolloutpipe("tiny")), model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    one = JudgeService(
        dataclasses.replace(CONFIG, model=str(model)),
        root / "judge.log",
        stopped_s=30.0,
        start_timeout_s=START_S,
        max_restarts=5,
    )
    yield one
    processes = {one.pid, *descendants(one.pid)}
    one.close()
    wait_until(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()], "nothing of it is left")


def ask(
    service: JudgeService, text: str = "It is 7.", *, answer_retries: int = 20, **fields: Any
) -> tuple[Score | None, Judge]:
    """A score, or None where the model gave none.

    Its answer depends on the nonce: it is empty at times, or digits up to the limit.
    """

    async def body() -> tuple[Score | None, Judge]:
        one = Judge(dataclasses.replace(service.config, **fields))
        try:
            return await one.score(Response(text=text, finish="stop", num_tokens=8), TASK), one
        except VerifierError:
            return None, one
        finally:
            await one.close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judge, "ANSWER_RETRIES", answer_retries)
        patched.setattr(judge, "MAX_BACKOFF_S", 0.05)
        return asyncio.run(asyncio.wait_for(body(), START_S))


def test_colocated_judge_scores_by_what_its_model_says(service):
    score, one = ask(service)
    assert score is not None and 0 <= score.value <= 1 and one.counts.problems.keys() <= UNREADABLE


def test_colocated_judge_keeps_to_the_schema(service):
    """A model that says digits for ever is cut off within a number; whatever else it says is by the schema."""
    score, one = ask(service, parser="json", json_fields={"score": "number"}, answer_retries=0)
    assert score is not None or one.counts.problems == {"cut_off": 1}


def test_colocated_judge_scores_a_response_that_is_longer_than_its_context(service):
    """One token is one character here: of 2,000 a context of 512 takes a quarter, less what is around, so an eighth.

    What such a model says of so long a text is nothing that is sure to be a score.
    """
    score, one = ask(service, "It is 7. " * 222, answer_retries=3)
    assert one.counts.problems.pop("status_400") == 3
    assert (score is not None) or one.counts.problems.total() == 4
    assert one.counts.problems.keys() <= UNREADABLE


def test_colocated_judge_answers_nobody_without_its_key(service):
    request = urllib.request.Request(f"{service.config.url}/models")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 401


def test_colocated_judge_that_was_killed_is_back_at_its_address(service):
    before = {service.pid, *descendants(service.pid)}
    os.kill(service.pid, signal.SIGKILL)
    wait_until(lambda: service.pid not in before and service._answers(), "another one serves", deadline_s=START_S)
    assert service.num_restarts == 1
    wait_until(lambda: not [pid for pid in before if Path(f"/proc/{pid}").exists()], "nothing of the first is left")
    score, _ = ask(service)
    assert score is not None
