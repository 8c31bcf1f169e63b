"""Sampling with weights that change in flight, against whole forward passes."""

import numpy as np
import pytest
import torch
import transformers

from tests.bench.mixed_policy import divergence, lag_at, sample

NUM_TOKENS, END = 9, 3


@pytest.fixture(scope="module")
def policies():
    config = transformers.Qwen3Config(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return [transformers.Qwen3ForCausalLM(config).eval() for _ in range(2)]


def sampled(policy_at, *, keeps_cache: bool):
    prompts = [np.array(p, np.int32) for p in ([5], [7, 8, 9], [11, 12])]
    return sample(policy_at, prompts, num_tokens=NUM_TOKENS, ends=[END], keeps_cache=keeps_cache, seed=1)


def test_lags_of_equation_8():
    assert [lag_at(t, lag=4, num_tokens=8) for t in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert {lag_at(t, lag=1, num_tokens=8) for t in range(8)} == {0}


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_responses_of_one_policy_do_not_diverge_from_it(policies, keeps_cache):
    found = sampled(lambda _: policies[0], keeps_cache=keeps_cache)
    assert abs(divergence(found, policies[0])) < 1e-6
    assert divergence(found, policies[1]) > 0.01


def test_after_a_change_a_recomputed_cache_is_the_new_policys_and_a_kept_one_is_not(policies):
    changes_at = 4

    def errors(keeps_cache: bool) -> torch.Tensor:
        found = sampled(lambda i: policies[i >= changes_at], keeps_cache=keeps_cache)
        positions = (found.is_token.cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            out = policies[1](found.tokens, attention_mask=found.is_token.long(), position_ids=positions)
        wanted = out.logits[:, -NUM_TOKENS - 1 : -1].log_softmax(-1)
        is_token = found.is_token[:, -NUM_TOKENS:]
        return ((found.logprobs - wanted).abs().amax(-1) * is_token)[:, changes_at:].max()

    assert errors(keeps_cache=False) < 1e-5
    assert errors(keeps_cache=True) > 1e-2
