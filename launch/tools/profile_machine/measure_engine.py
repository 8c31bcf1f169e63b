"""How fast an engine decodes, against the number of sequences it runs at once (PipelineRL's U(h), appendix A)."""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from actor.engine_protocol import Engine
from actor.vllm.engine import VllmEngine
from bridge.rollout_types import Sampling

_FEW = 4
"""Tokens of the shorter of two measurements, whose difference leaves out the prompts and the start."""
_SHORT, PROMPT_TOKENS = 4, 16
"""Prompt tokens, likewise; no prompt is longer where no context is asked for."""
_PROMPT_TOKENS_PER_STEP = 1024
"""An engine computes at least so many prompt tokens a step, so it is known how many steps prompts take at most."""
_REPEATS = 3


async def profile_engine(
    engine: VllmEngine, *, counts: Sequence[int], num_tokens: int, context_tokens: int = 0, max_tokens: int = 0
) -> dict[str, Any]:
    """The `engine` part of a profile (`launch/tools/plan/profile.py`), measured on the engine as it runs.

    Args:
      engine: serves weights already, and nobody else.
      counts: numbers of sequences, rising; the last is what the engine runs at most.
      num_tokens: response length of the measurements.
      context_tokens: sequences are about so long while they are timed, or as long as all of them fit the KV cache; 0:
        as short as can be.
      max_tokens: the engine's longest sequence; needed with `context_tokens`.
    """
    kv_tokens = engine.size.kv_tokens

    async def speed(count: int) -> float:
        prompt, few = _context(count, num_tokens, min(context_tokens, kv_tokens // count - num_tokens), max_tokens)
        return await tokens_per_s(engine, count, num_tokens, prompt_tokens=prompt, few=few)

    speeds = [await speed(count) for count in counts]
    return {
        "running": list(counts),
        "tokens_per_s": speeds,
        "max_num_seqs": counts[-1],
        "kv_capacity_tokens": kv_tokens,
        **await request_costs(engine, counts[-1], step_s=counts[-1] / speeds[-1]),
    }


def counts_up_to(limit: int) -> list[int]:
    """1, 2, 4, ... and `limit`."""
    powers = [1 << i for i in range(limit.bit_length())]
    return [p for p in powers if p < limit] + [limit]


def _context(count: int, num_tokens: int, context_tokens: int, max_tokens: int) -> tuple[int, int]:
    """(prompt tokens, tokens of the shorter measurement) so that what they differ by is decoded around a context.

    The shorter responses outlast the computation of all prompts, so that this is the same in both measurements.
    """
    context_tokens = min(context_tokens, max_tokens - num_tokens // 2)
    if context_tokens <= _SHORT + num_tokens // 2:
        return _SHORT, _FEW
    few = _FEW + math.ceil(count * context_tokens / _PROMPT_TOKENS_PER_STEP)
    more = num_tokens - _FEW
    prompt = max(_SHORT, context_tokens - few - more // 2)
    return prompt, max(_FEW, min(few, max_tokens - prompt - more))


async def tokens_per_s(
    engine: Engine, count: int, num_tokens: int, *, prompt_tokens: int = _SHORT, few: int = _FEW
) -> float:
    """Tokens a second, all together, of `count` sequences.

    Two batches, of `few` tokens and of `num_tokens - _FEW` more, all begun at once: the rate is the tokens they differ
    by over the seconds they differ by. The median of some tries.

    Raises:
      ValueError: `num_tokens` is too small to measure a difference.
    """
    if num_tokens < 2 * _FEW:
        raise ValueError(f"an engine's speed needs responses of {2 * _FEW} tokens or more, got {num_tokens}")
    await _batch_s(engine, count, few, prompt_tokens)  # once unmeasured, for what is compiled on first use
    more = num_tokens - _FEW
    times = []
    for _ in range(_REPEATS):
        first = await _batch_s(engine, count, few, prompt_tokens)
        times.append(await _batch_s(engine, count, few + more, prompt_tokens) - first)
    return count * more / max(statistics.median(times), 1e-9)


async def request_costs(engine: Engine, count: int, *, step_s: float) -> dict[str, float]:
    """What requests cost beside their tokens: `prefill_s_per_token`, `request_s` and `start_latency_s` of a profile.

    From responses of one token: `count` longer prompts against as many shorter ones give the prompt token, many
    requests against a single one what a request costs, and the single one, less its token, what is left.

    Args:
      engine: serves nobody else.
      count: requests sent at once; as many as it runs.
      step_s: what a step of `count` sequences takes, which all `count` responses share.
    """
    many, longer, one, few = [
        statistics.median(times[1:])  # the first may compile
        for times in zip(*[await _costs_once(engine, count) for _ in range(1 + _REPEATS)], strict=True)
    ]
    prefill_s = max(longer - many, 0.0) / (count * (PROMPT_TOKENS - _SHORT))
    token_s = (few - one) / (_FEW - 1)
    alone_s = max(one - token_s, 0.0)
    request_s = max(many - step_s - alone_s, 0.0) / (count - 1) - _SHORT * prefill_s if count > 1 else 0.0
    request_s = max(request_s, 0.0)
    return {
        "prefill_s_per_token": prefill_s,
        "request_s": request_s,
        "start_latency_s": max(alone_s - request_s - _SHORT * prefill_s, 0.0),
    }


async def _costs_once(engine: Engine, count: int) -> tuple[float, float, float, float]:
    return (
        await _batch_s(engine, count, 1, _SHORT),
        await _batch_s(engine, count, 1, PROMPT_TOKENS),
        await _batch_s(engine, 1, 1, _SHORT),
        await _batch_s(engine, 1, _FEW, _SHORT),
    )


async def _batch_s(engine: Engine, count: int, num_tokens: int, prompt_tokens: int) -> float:
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    prompt = np.ones(prompt_tokens, np.int32)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            name = f"profile-{count}-{num_tokens}-{prompt_tokens}.{i}"
            tasks.create_task(engine.sample(prompt, sampling, request_id=name, priority=i))
    return time.perf_counter() - start
