"""Partial responses: joined they are one response, and the request that goes on has what is left."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from actor.engine_protocol import PartialSample, concat, continuation
from bridge.rollout_types import Sampling, Version

PROMPT = np.array([1, 2, 3], np.int32)


def part(num_tokens: int, step: int) -> PartialSample:
    return PartialSample(
        tokens=np.arange(num_tokens, dtype=np.int32) + 100 * step,
        logprobs=np.full(num_tokens, -step, np.float32),
        token_versions=(Version(incarnation=0, step=step),) * num_tokens,
    )


def test_joined_parts_are_one_response_with_a_version_for_each_token():
    sample = concat([part(2, 1), part(0, 2), part(1, 3)]).finished("stop")
    assert sample.tokens.tolist() == [100, 101, 300] and sample.logprobs.tolist() == [-1, -1, -3]
    assert [v.step for v in sample.token_versions] == [1, 1, 3] and sample.finish == "stop"
    assert (sample.tokens.dtype, sample.logprobs.dtype) == (np.int32, np.float32)


def routing_of(num_rows: int, step: int) -> np.ndarray:
    return np.full((num_rows, 2, 1), step, np.uint8)


def test_token_keeps_the_routing_of_the_request_that_sampled_its_successor():
    # Each request computes all before it again: prompt and 2 tokens, then 1 more.
    parts = [
        dataclasses.replace(part(2, 1), routed_experts=routing_of(3 + 2 - 1, 1)),
        part(0, 2),
        dataclasses.replace(part(1, 3), routed_experts=routing_of(3 + 3 - 1, 3)),
    ]
    joined = concat(parts).routed_experts
    assert isinstance(joined, np.ndarray) and joined[:, 0, 0].tolist() == [1, 1, 1, 1, 3]
    assert concat(parts).finished("stop").routed_experts is not UNSET
    # What began elsewhere without a capture has that of the request that computed it again.
    again = concat([part(2, 1), parts[2]]).routed_experts
    assert isinstance(again, np.ndarray) and again[:, 0, 0].tolist() == [3] * 5
    assert concat([parts[0], part(1, 3)]).routed_experts is UNSET


@given(sizes=st.lists(st.integers(0, 20), max_size=6), min_tokens=st.integers(0, 200), left=st.integers(1, 50))
def test_prompt_grows_by_what_the_limits_lose(sizes, min_tokens, left):
    total = sum(sizes)
    sampling = Sampling(
        max_tokens=total + left, min_tokens=min(min_tokens, total + left), stop_token_ids=(9,), temperature=0.5
    )
    prompt, rests = continuation(PROMPT, sampling, [part(n, i) for i, n in enumerate(sizes)])
    assert prompt.size == 3 + total and prompt[:3].tolist() == [1, 2, 3]
    assert rests.max_tokens == left
    assert total + rests.min_tokens == max(total, sampling.min_tokens)
    assert (rests.stop_token_ids, rests.temperature) == ((9,), 0.5)


def test_nothing_left_is_refused():
    with pytest.raises(ValueError, match="max_tokens=0"):
        continuation(PROMPT, Sampling(max_tokens=2), [part(2, 0)])
