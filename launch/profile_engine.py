"""How fast an engine decodes, against the number of sequences it runs at once (PipelineRL's U(h), appendix A)."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from actor.engine import Engine
from bridge.types import Sampling

_FEW = 4
"""Tokens of the shorter of two measurements, whose difference leaves out the prompts and the start."""


async def profile_engine(
    engine: Engine, *, counts: Sequence[int], num_tokens: int, prompt_tokens: int, temperature: float = 1.0
) -> list[tuple[int, float]]:
    """Tokens a second at each number of running sequences.

    Two batches of h requests, of few and of `num_tokens` tokens, all begun at once: the rate is the tokens they
    differ by over the seconds they differ by. The smallest count is run once before, for what is compiled on first use.

    Args:
      engine: serves weights already, and nobody else.
      counts: numbers of sequences, each at most what the engine runs at once.
      num_tokens: response length of the longer batch.
      prompt_tokens: prompt length.
      temperature: as the run samples.

    Raises:
      ValueError: `num_tokens` is too small to measure a difference.
    """
    if num_tokens < 2 * _FEW:
        raise ValueError(f"an engine's speed needs responses of {2 * _FEW} tokens or more, got {num_tokens}")
    await _batch_s(engine, min(counts), num_tokens, prompt_tokens, temperature)
    table = []
    for count in counts:
        few = await _batch_s(engine, count, _FEW, prompt_tokens, temperature)
        many = await _batch_s(engine, count, num_tokens, prompt_tokens, temperature)
        table.append((count, count * (num_tokens - _FEW) / max(many - few, 1e-9)))
    return table


async def profile_prefill(engine: Engine, *, count: int, short: int, long: int) -> float:
    """Seconds a prompt token costs: `count` prompts of `long` tokens against as many of `short` ones, one token each."""
    for prompt_tokens in (short, long):  # once unmeasured
        await _batch_s(engine, count, 1, prompt_tokens, 1.0)
    few = await _batch_s(engine, count, 1, short, 1.0)
    many = await _batch_s(engine, count, 1, long, 1.0)
    return max(many - few, 0.0) / (count * (long - short))


async def _batch_s(engine: Engine, count: int, num_tokens: int, prompt_tokens: int, temperature: float) -> float:
    sampling = Sampling(max_tokens=num_tokens, temperature=temperature, ignore_eos=True)
    prompt = np.ones(prompt_tokens, np.int32)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            name = f"profile-{count}-{num_tokens}-{prompt_tokens}.{i}"
            tasks.create_task(engine.sample(prompt, sampling, request_id=name, priority=i))
    return time.perf_counter() - start
