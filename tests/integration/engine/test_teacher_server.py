"""A teacher on a real vLLM server: its logprobs, and a run that is distilled from it."""

import asyncio
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import UnsetType
from transformers import AutoModelForCausalLM

from actor.engine_protocol import Sample
from actor.teacher_servers import TeacherServers
from bridge.rollout_types import Version
from bridge.text.text_tokens import read_tokenizer
from configs.sections.rewards import JudgeConfig
from launch.services.judge_server import COMMAND, HOST, arguments, environment
from tests.bridge.factories import make_ticket
from tests.integration.support import jobs
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine]
CONTEXT = 512


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[str]:
    """A server with the tests' model, by `vllm serve` without a key."""
    config = JudgeConfig(colocate=True, model=str(model), max_tokens=8, engine={"max_model_tokens": CONTEXT})
    around = environment(config, os.environ, key="")
    del around["VLLM_API_KEY"]
    with socket.socket() as one:
        one.bind((HOST, 0))
        port = one.getsockname()[1]
    log = tmp_path_factory.mktemp("teacher") / "server.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [*COMMAND, *arguments(config, port), "--dtype=float32"], stdout=output, stderr=subprocess.STDOUT, env=around
        )

    def answers() -> bool:
        assert server.poll() is None, log.read_text()
        try:
            return urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        wait_until(answers, "the server answers", deadline_s=300)
        yield f"http://{HOST}:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def test_logprobs_of_the_server_are_those_of_transformers(url: str, model: Path):
    rng = np.random.default_rng(0)
    prompt, response = (rng.integers(0, 95, size).astype(np.int32) for size in (7, 40))
    sample = Sample(
        tokens=response,
        logprobs=np.zeros(response.size, np.float32),
        token_versions=(Version(incarnation=0, step=0),) * response.size,
        finish="stop",
    )

    async def ask() -> Sample:
        servers = TeacherServers({"": ("loss.teacher_url", url)})
        try:
            await servers.check(read_tokenizer(model), CONTEXT - 1)
            return await servers.score(make_ticket(prompt_tokens=prompt), sample)
        finally:
            await servers.close()

    found = asyncio.run(ask()).teacher_logprobs
    assert not isinstance(found, UnsetType)
    tokens = torch.tensor(np.concatenate([prompt, response])[None], dtype=torch.long)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits
    logp = logits.double().log_softmax(-1)[0, prompt.size - 1 : -1]
    want = logp.gather(-1, tokens[0, prompt.size :, None])[:, 0]
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_run_is_distilled_by_the_servers_logprobs(url: str, model: Path, tmp_path: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=8,
        loss__name="truncated_is",
        loss__teacher_coef=1,
        loss__teacher_url=url,
        sampling__temperature=1,
    )
    try:
        job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=8, per_update=2)
    kl = [row["teacher_kl"] for row in job.rows("step")]
    # The teacher is the policy before its first update: no other alignment of tokens has a KL of 0 there. Afterwards a
    # mean over sampled tokens has either sign.
    assert abs(kl[0]) < 1e-5 and max(map(abs, kl[1:])) > 1e-3
