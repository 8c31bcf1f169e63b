"""With prefix caching a turn of an episode costs its new tokens only, on a real vLLM engine."""

from pathlib import Path

import numpy as np
import pytest

from actor.environments.transcript import EpisodeRequest, EpisodeTurns
from bridge.rollout_types import Sampling
from bridge.snapshots.snapshot_writer import SnapshotWriter
from tests.bridge.snapshots.whole import write_whole
from tests.bridge.snapshots.written import KEYS, fetch
from tests.integration.support import models
from tests.integration.support.engines import ENGINES, Bench, for_engines

pytestmark = [pytest.mark.integration, pytest.mark.engine]

PROMPT = np.arange(260, dtype=np.int32) % 50 + 20
OBSERVED = np.array([20, 21, 22, 23], np.int32)
TURN_TOKENS = 32


@pytest.fixture
def counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Prompt tokens of each request that has ended, and those of them that were there already, by vLLM's own count."""
    counts: list[tuple[int, int]] = []
    generate = bench.engine._llm.generate

    async def counting(*args, **kwargs):
        async for output in generate(*args, **kwargs):
            counts.append((len(output.prompt_token_ids or ()), output.num_cached_tokens or 0))
            yield output

    monkeypatch.setattr(bench.engine._llm, "generate", counting)
    return counts


def begin(bench: Bench) -> EpisodeTurns:
    episode = EpisodeRequest(
        environment="",
        prompt_tokens=PROMPT,
        row={},
        sampling=Sampling(max_tokens=250, ignore_eos=True, temperature=0.7),
        request_id="prefixes",
        priority=0,
    )
    return EpisodeTurns(bench.engine, episode, request_id="prefixes", budget_tokens=250, max_turn_tokens=TURN_TOKENS)


async def play_turn(turns: EpisodeTurns) -> None:
    await turns.take()
    turns.transcript.observe(OBSERVED)


@for_engines([kind for kind in ENGINES if kind.prefix_caching])
def test_turn_computes_only_what_follows_the_turn_before_as_long_as_the_weights_stay(
    bench: Bench, counted: list[tuple[int, int]]
):
    block = bench.engine._llm.vllm_config.cache_config.block_size
    assert block is not None and block <= PROMPT.size
    turns = begin(bench)

    async def body():
        await bench.update()
        await play_turn(turns)
        await play_turn(turns)
        await bench.update()
        await play_turn(turns)

    bench.run(body())
    sizes = [PROMPT.size + i * (TURN_TOKENS + OBSERVED.size) for i in range(3)]
    # Whole blocks are kept; nothing of other weights is.
    shared = (PROMPT.size + TURN_TOKENS) // block * block
    assert counted == [(sizes[0], 0), (sizes[1], shared), (sizes[2], 0)]


@for_engines([kind for kind in ENGINES if kind.prefix_caching])
def test_version_that_is_loaded_again_uses_no_prefix_of_its_first_load(bench: Bench, tmp_path: Path):
    async def body():
        version = await bench.update()
        await bench.sample(PROMPT, max_tokens=4)
        again = SnapshotWriter(tmp_path / "again", **KEYS)
        bench.weights[version] = weights = models.perturbed(models.read_weights(bench.folder), seed=99)
        manifest = write_whole(again, version, weights, dtype=bench.config.model.served_dtype)
        fetch(tmp_path / "again", manifest, tmp_path / "copy", **KEYS)
        await bench.engine.swap_weights(tmp_path / "copy", manifest)
        sample = await bench.sample(PROMPT, max_tokens=4)
        again.remove()
        return np.abs(sample.logprobs - bench.reference(version, PROMPT, sample)).max()

    assert bench.run(body()) <= 1e-4


@for_engines([kind for kind in ENGINES if not kind.prefix_caching][:1])
def test_turn_without_prefix_caching_computes_all_that_was_said(bench: Bench, counted: list[tuple[int, int]]):
    turns = begin(bench)

    async def body():
        await bench.update()
        await play_turn(turns)
        await play_turn(turns)

    bench.run(body())
    assert [cached for _, cached in counted] == [0, 0]
