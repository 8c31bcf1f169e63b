"""The oracle itself: it agrees with a request computed token by token, and one foreign tensor or stamp shows."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from bridge.rollout_types import Group, Version
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.network.real.oracle import BOUND, Oracle
from tests.integration.support import models
from tests.support.lazy import torch

pytestmark = pytest.mark.heavy

PROMPT = np.array([7, 8, 9], np.int32)
STEPS = np.repeat(np.array([3, 4, 6], np.int32), [5, 4, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_folder(tmp_path_factory.mktemp("model"), tied=False)


@functools.cache
def weights_of(folder: Path, version: Version) -> dict[str, np.ndarray]:
    return models.perturbed(models.read_weights(folder), seed=version.step)


@functools.cache
def sampled(folder: Path, *, keeps_cache: bool) -> Group:
    """A group whose one response was sampled as an engine does it: one token a pass, weights replaced in between."""
    oracle = Oracle(folder, lambda v: weights_of(folder, v), keeps_cache=keeps_cache)
    random = torch.Generator().manual_seed(0)
    tokens, logprobs, cache = PROMPT.tolist(), [], None
    with torch.no_grad():
        for step in STEPS.tolist():
            inputs = tokens[-1:] if cache is not None else tokens
            model = oracle._model(Version(incarnation=0, step=step))
            out = model(torch.tensor([inputs]), past_key_values=cache, use_cache=keeps_cache)
            cache = out.past_key_values if keeps_cache else None
            all_logprobs = torch.log_softmax(out.logits[0, -1], -1)
            tokens.append(int(torch.multinomial(all_logprobs.exp(), 1, generator=random)))
            logprobs.append(float(all_logprobs[tokens[-1]]))
    rollout = make_rollout(
        len(STEPS),
        tokens=np.array(tokens[len(PROMPT) :], np.int32),
        behavior_logprobs=np.array(logprobs, np.float32),
        token_versions=STEPS,
    )
    return make_group(make_ticket(num_samples=1, prompt_tokens=PROMPT), rollouts=(rollout,))


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_group_through_two_updates_agrees_and_the_other_way_of_the_cache_does_not(folder: Path, keeps_cache: bool):
    group = sampled(folder, keeps_cache=keeps_cache)
    off = {
        keeps: Oracle(folder, lambda v: weights_of(folder, v), keeps_cache=keeps).off(group) for keeps in (False, True)
    }
    assert off[keeps_cache] < BOUND / 4
    assert off[not keeps_cache] > 100 * BOUND


def test_one_tensor_of_the_version_before_is_found_whichever_it_is(folder: Path):
    group = sampled(folder, keeps_cache=True)
    oracle = Oracle(folder, lambda v: weights_of(folder, v), keeps_cache=True)
    old, new = (weights_of(folder, Version(incarnation=0, step=step)) for step in (4, 6))
    model = oracle._model(Version(incarnation=0, step=6))
    for name in old:
        model.load_state_dict({name: torch.from_numpy(old[name])}, strict=False)
        assert oracle.off(group) > 20 * BOUND, name
        model.load_state_dict({name: torch.from_numpy(new[name])}, strict=False)
    assert oracle.off(group) < BOUND / 4


@pytest.mark.parametrize("place", [4, 5, 9])
def test_one_token_with_another_stamp_is_found(folder: Path, place: int):
    group = sampled(folder, keeps_cache=True)
    versions = STEPS.copy()
    versions[place] = {4: 4, 5: 3, 9: 4}[place]
    rollout = dataclasses.replace(group.rollouts[0], token_versions=versions)
    oracle = Oracle(folder, lambda v: weights_of(folder, v), keeps_cache=True)
    assert oracle.off(dataclasses.replace(group, rollouts=(rollout,))) > 20 * BOUND
