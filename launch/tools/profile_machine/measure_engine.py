"""Decoding speed of an engine by number of concurrent sequences (U(h) of PipelineRL, appendix A)."""

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
"""Tokens of the shorter measurement; subtracting it removes the cost of prompts and startup."""
_SHORT, PROMPT_TOKENS = 4, 16
"""Prompt tokens of the two measurements; the maximum prompt length without a requested context."""
_PROMPT_TOKENS_PER_STEP = 1024
"""Minimum prompt tokens per engine step, which bounds the steps that prompts take."""
_REPEATS = 3
_LONGEST = 16
"""Tokens of the longest response where responses end one by one; they have 1, 2, 3 ... of them."""
_FULL_BATCHES = 4
"""Requests per sequence of the shorter of the two measurements of that kind; the longer one has twice as many."""


async def profile_engine(
    engine: VllmEngine, *, counts: Sequence[int], num_tokens: int, context_tokens: int = 0, max_tokens: int = 0
) -> dict[str, Any]:
    """Measures the `engine` part of a profile (`launch/tools/plan/profile.py`) on an engine without other clients.

    The last of the increasing `counts` of sequences is the engine's maximum. `context_tokens` is the approximate
    sequence length during the measurement, bounded by the KV cache; 0 means minimal. It requires `max_tokens`, the
    engine's maximum sequence length.
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
    """Returns 1, 2, 4, ... and `limit`."""
    powers = [1 << i for i in range(limit.bit_length())]
    return [p for p in powers if p < limit] + [limit]


def _context(count: int, num_tokens: int, context_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Returns (prompt tokens, tokens of the shorter measurement) for timed tokens that are decoded around a context."""
    # The shorter responses outlast the computation of all prompts, so both measurements include the same prompt work.
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
    """Returns the tokens/s of `count` concurrent sequences in total.

    Runs batches of `few` tokens and of `num_tokens - _FEW` more. The rate is the difference of tokens over the
    difference of seconds, the median of several tries.
    """
    if num_tokens < 2 * _FEW:
        raise ValueError(f"--context_tokens: expected responses of at least {2 * _FEW} tokens, got {num_tokens}")
    await _batch_s(engine, count, few, prompt_tokens)  # not measured: compiles on first use
    more = num_tokens - _FEW
    times = []
    for _ in range(_REPEATS):
        first = await _batch_s(engine, count, few, prompt_tokens)
        times.append(await _batch_s(engine, count, few + more, prompt_tokens) - first)
    return count * more / max(statistics.median(times), 1e-9)


async def request_costs(engine: Engine, count: int, *, step_s: float) -> dict[str, float]:
    """Measures costs per request: `prefill_s_per_token`, `request_s`, `restart_s`, `start_latency_s` of a profile.

    The difference between `count` longer and `count` shorter prompts of responses of one token gives the cost per
    prompt token, and `count` requests compared with one the cost per request that starts with others, as all do when
    they start again. One that starts while others are decoded costs more: `request_s` is measured on responses that end
    one by one, as what twice as many of them take longer, less their tokens and prompts. The time of one request
    without its token is the latency. `count` is the engine's maximum, and `step_s` the seconds per decoding step of
    `count` sequences.
    """
    many, longer, one, few, half, twice = [
        statistics.median(times[1:])  # the first try may compile
        for times in zip(*[await _costs_once(engine, count) for _ in range(1 + _REPEATS)], strict=True)
    ]
    prefill_s = max(longer - many, 0.0) / (count * (PROMPT_TOKENS - _SHORT))
    alone_s = max(one - (few - one) / (_FEW - 1), 0.0)
    restart_s = max(many - step_s - alone_s, 0.0) / (count - 1) - _SHORT * prefill_s if count > 1 else 0.0
    num_requests = _num_staggered(count)
    decode_s = num_requests / count * (1 + _LONGEST) / 2 * step_s
    request_s = max((twice - half - decode_s) / num_requests - _SHORT * prefill_s, 0.0)
    return {
        "prefill_s_per_token": prefill_s,
        "request_s": request_s,
        "restart_s": max(restart_s, 0.0),
        "start_latency_s": max(alone_s - request_s - _SHORT * prefill_s, 0.0),
    }


def _num_staggered(count: int) -> int:
    """Returns the number of requests of the shorter measurement, in which each length is as frequent as any other."""
    return math.ceil(_FULL_BATCHES * count / _LONGEST) * _LONGEST


async def _costs_once(engine: Engine, count: int) -> tuple[float, ...]:
    staggered = [1 + i % _LONGEST for i in range(_num_staggered(count))]
    return (
        await _batch_s(engine, count, 1, _SHORT),
        await _batch_s(engine, count, 1, PROMPT_TOKENS),
        await _batch_s(engine, 1, 1, _SHORT),
        await _batch_s(engine, 1, _FEW, _SHORT),
        await _seconds(engine, staggered, _SHORT),
        await _seconds(engine, 2 * staggered, _SHORT),
    )


async def _batch_s(engine: Engine, count: int, num_tokens: int, prompt_tokens: int) -> float:
    return await _seconds(engine, [num_tokens] * count, prompt_tokens)


async def _seconds(engine: Engine, lengths: Sequence[int], prompt_tokens: int) -> float:
    prompt = np.ones(prompt_tokens, np.int32)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for i, num_tokens in enumerate(lengths):
            sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
            name = f"profile-{len(lengths)}-{num_tokens}-{prompt_tokens}.{i}"
            tasks.create_task(engine.sample(prompt, sampling, request_id=name, priority=i))
    return time.perf_counter() - start
