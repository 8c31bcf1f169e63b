"""A response whose weights changed twice while it was sampled, trained a step later; transformers is the forward."""

import dataclasses

import numpy as np
import pytest

from bridge import codec
from bridge.rollout_types import Group
from learner.model import hf_save
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.learner.streams import MODEL, TEMPERATURE, config_of, fresh_params, pack, random_groups, steps_of, stream
from tests.support.lazy import torch, transformers

STEP = 8
MAX_WEIGHT = 1.5
PROMPT = np.array([3, 17, 5], np.int32)
# (version, tokens) of each response's spans. At step 8 all of it is 1 to 3 steps old.
SPANS = [
    [(5, 3), (6, 2), (7, 4)],
    [(5, 1), (6, 6), (7, 1)],
    [(5, 2), (6, 1), (7, 9)],
    [(6, 1)],
]
REWARDS = [1.0, 0.0, 0.0, 0.25]
NOT_SAMPLED = (0, 4)
"""Response and place of one token that the policy did not sample; the last of version 6."""


@dataclasses.dataclass
class Oracle:
    """An update's numbers, from one entry a trained token, in float64."""

    logp: np.ndarray
    mu: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray

    def metrics(self) -> dict[str, float]:
        n = self.logp.size
        w = np.exp(self.logp - self.mu)
        lag = STEP - self.versions
        return {
            "tokens": n,
            "lag/mean": lag.sum() / n,
            "lag/max": lag.max(),
            "ratio/mean": w.sum() / n,
            "ess": w.sum() ** 2 / (n * (w**2).sum()),
            "clip_fraction": (w > MAX_WEIGHT).sum() / n,
            "max_abs_dlogprob": np.abs(self.logp - self.mu).max(),
            "loss": -(np.minimum(w, MAX_WEIGHT) * self.advantages * self.logp).sum() / n,
        }


def reference_logprobs(model, tokens: np.ndarray) -> np.ndarray:
    """log p of each response token by transformers."""
    whole = torch.from_numpy(np.concatenate([PROMPT, tokens]).astype(np.int64))
    with torch.no_grad():
        logits = model(whole[None]).logits[0].double() / TEMPERATURE
    logp = torch.log_softmax(logits, -1).numpy()
    return logp[np.arange(PROMPT.size - 1, whole.numel() - 1), tokens]


def in_flight_group(model) -> tuple[Group, Oracle]:
    """The group, whose behaviour was the further from today's policy the older the token; and what is known of it."""
    random = np.random.default_rng(0)
    rollouts, parts = [], []
    for i, (spans, reward) in enumerate(zip(SPANS, REWARDS, strict=True)):
        versions = np.concatenate([np.full(n, v) for v, n in spans])
        tokens = random.integers(0, MODEL.vocab_size, versions.size)
        logp = reference_logprobs(model, tokens)
        drift = random.uniform(0.2, 0.4, versions.size) * random.choice([-1, 1], versions.size)
        mu = np.minimum(logp + drift * (STEP - versions), 0).astype(np.float32)
        mask = np.ones(versions.size, np.bool_)
        if i == NOT_SAMPLED[0]:
            mask[NOT_SAMPLED[1]], mu[NOT_SAMPLED[1]] = False, 0
        advantages = np.full(versions.size, reward - sum(REWARDS) / len(REWARDS))
        parts.append([x[mask] for x in (logp, mu.astype(np.float64), advantages, versions)])
        rollouts.append(
            make_rollout(
                tokens=tokens.astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=mu,
                token_versions=versions.astype(np.int32),
                reward=reward,
            )
        )
    group = make_group(make_ticket("in-flight", prompt_tokens=PROMPT), rollouts=tuple(rollouts))
    return group, Oracle(*(np.concatenate(x) for x in zip(*parts, strict=True)))


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [4, 1], ids=["one-batch", "several-batches"])
def test_group_over_three_versions_is_trained_with_each_tokens_own_lag_and_ratio(tmp_path, rows):
    config = config_of(
        rows=rows, name="truncated_is", max_weight=MAX_WEIGHT, advantage="mean_baseline", normalization="token"
    )
    steps = steps_of(config)
    state = steps.init(fresh_params())
    for number in range(STEP):
        for micro in stream(config, random_groups(number, 2)):
            state = steps.accumulate(state, micro.batch)
        state, _ = steps.apply(state)
    assert int(state.step) == STEP and int(state.skipped_updates) == 0

    hf_save.save(tmp_path / "model", MODEL, state.params)
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
        .float()
        .eval()
    )
    group, oracle = in_flight_group(model)
    group = codec.decode(Group, codec.encode(group))  # as it comes out of the store
    batches = pack(config, [group], ends_update=True)
    assert (len(batches) > 1) == (rows == 1)
    for micro in batches:
        state = steps.accumulate(state, micro.batch)
    _, metrics = steps.apply(state)

    wanted = oracle.metrics()
    assert wanted["lag/max"] == 3 and 0 < wanted["clip_fraction"] < 1 and wanted["ess"] < 0.95
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)
    assert np.isnan(metrics["max_abs_dlogprob_lag0"])  # no token is of the current weights
