"""The batch rollout that queue scheduling replaces (ROLL Flash, section 5.1): no queue, and barriers.

A round's prompts are dealt out to the engines beforehand, as whole groups in equal numbers. Rewards are looked at when
the last response of the batch has ended. Groups without variance are dropped, and as many further prompts make the next
batch, dealt out likewise, until the round is full. It is no mode of Sluice. It runs on the engines themselves, without
store, claims or training beside it, so what it is compared with pays for more than it does.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from bridge.rollout_types import Sampling
from configs.schema import Config


def deal(num_groups: int, num_engines: int) -> list[int]:
    """The engine of each group of a batch."""
    return [i % num_engines for i in range(num_groups)]


async def roll_out(
    engines: Sequence[Any],
    prompts: Sequence[Int32[np.ndarray, " P"]],
    is_flat: Sequence[bool],
    config: Config,
    *,
    num_rounds: int,
) -> list[float]:
    """Rounds, one after the other; the seconds that each took. Raises ValueError if there are too few prompts.

    `prompts` are in the order in which they are taken; `is_flat` says of each whether its group has no variance.
    """
    numbers = iter(range(len(prompts)))
    sampling = Sampling(max_tokens=config.sampling.max_response_tokens)
    seconds = []
    for _ in range(num_rounds):
        start_s = time.monotonic()
        num_missing = config.rounds.groups_per_round
        while num_missing:
            batch = list(itertools.islice(numbers, num_missing))
            if len(batch) < num_missing:
                raise ValueError(f"{len(prompts)} prompts are too few for {num_rounds} rounds")
            await asyncio.gather(
                *(
                    engines[engine].sample(prompts[n], sampling, request_id=f"{n:09d}.{index}", priority=n)
                    for n, engine in zip(batch, deal(len(batch), len(engines)), strict=True)
                    for index in range(config.rounds.samples_per_group)
                )
            )
            num_missing = sum(is_flat[n] for n in batch)
        seconds.append(time.monotonic() - start_s)
    return seconds
