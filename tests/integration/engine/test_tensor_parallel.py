"""An engine over two processes: each loads its part of a snapshot and proves it; transformers is the oracle."""

import asyncio

import numpy as np
import pytest

from tests.actor.fakes import until
from tests.integration.engine.test_engine_updates import BOUND, LONG_PROMPT, PROMPT, assert_serves, spans
from tests.integration.support.engines import MAX_NUM_SEQS, EngineKind, for_engines

TIED = EngineKind(tensor_parallel_size=2)
OTHERS = [
    EngineKind(family="qwen2", tied=False, tensor_parallel_size=2, at_publish="abort_and_resume"),  # has biases
    EngineKind(family="qwen3_moe", tied=False, tensor_parallel_size=2),
]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.engine,
    for_engines([TIED, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in OTHERS)]),
]


def test_updates_of_two_processes_serve_the_snapshot(bench):
    assert bench.engine.size.tensor_parallel_size == 2
    for _ in range(2):
        version = bench.run(bench.update())
        assert_serves(bench, version)
        assert_serves(bench, version, LONG_PROMPT)


def test_update_in_flight_of_two_processes_stamps_every_token(bench):
    async def body():
        versions = [await bench.update()]
        before = bench.engine.num_sampled_tokens
        tasks = [asyncio.create_task(bench.sample(PROMPT, max_tokens=200)) for _ in range(MAX_NUM_SEQS)]
        await until(lambda: bench.engine.num_sampled_tokens >= before + MAX_NUM_SEQS * 60, "tokens", deadline_s=120)
        versions.append(await bench.update())
        return versions, await asyncio.gather(*tasks)

    versions, samples = bench.run(body())
    for sample in samples:
        assert [v for v, _ in spans(sample)] == versions and sample.tokens.size == 200
    num_first = spans(samples[0])[0][1]
    oldest = bench.reference(versions[0], PROMPT, samples[0])[:num_first]
    np.testing.assert_allclose(samples[0].logprobs[:num_first], oldest, atol=BOUND)
