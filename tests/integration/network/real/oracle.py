"""What transformers says about the tokens of real engines: whether each is by all of the weights that it names.

Another implementation computes each sampled token's logprob with the published weights of the version that the token is
stamped with, going on with the keys and values of the versions before it where the engine does. In float32 the two
agree to rounding; another version's bytes, in whichever tensor, are off by thousands of times that
(`test_oracle.py`).
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bridge.rollout_types import Group, Rollout, Version
from tests.support.lazy import torch, transformers

BOUND = 1e-4
"""Nats that an engine may be off, in float32; the learner's own (`Config.parity_bound`)."""


class Oracle:
    """Logprobs by the weights that a group names."""

    def __init__(
        self, folder: pathlib.Path, weights: Callable[[Version], Mapping[str, np.ndarray]], *, keeps_cache: bool
    ) -> None:
        """Loads nothing yet.

        Args:
          folder: the model's.
          weights: what was published as a version.
          keeps_cache: whether a request goes on with the keys and values of the weights before (publish.at_publish=keep
            with kv_cache=keep); else they are computed anew.
        """
        self._folder, self._weights, self._keeps_cache = folder, weights, keeps_cache
        self._model = functools.lru_cache(maxsize=64)(self._load)

    def off(self, group: Group) -> float:
        """Largest |log pi - log mu| over a group's tokens, in nats."""
        return max(float(np.abs(self.logprobs(group, r) - r.behavior_logprobs).max()) for r in group.rollouts)

    def logprobs(self, group: Group, rollout: Rollout) -> np.ndarray:
        """Of a rollout's tokens, each by the weights of its stamp."""
        num_prompt = group.prompt_tokens.size
        tokens = torch.from_numpy(np.concatenate([group.prompt_tokens, rollout.tokens]).astype(np.int64))
        cache: Any = None
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for step, start, end in spans(rollout.token_versions):
                # The token before the first one was sampled, and not read yet, when these weights came.
                first = num_prompt + start - 1 if cache is not None else 0
                model = self._model(Version(incarnation=group.incarnation, step=step))
                out = model(tokens[None, first : num_prompt + end - 1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values if self._keeps_cache else None
                logprobs = torch.log_softmax(out.logits[0, start - end :], -1)
                found.append(logprobs.gather(1, tokens[num_prompt + start : num_prompt + end, None])[:, 0])
        return torch.cat(found).numpy()

    def _load(self, version: Version) -> Any:
        config = transformers.AutoConfig.from_pretrained(self._folder)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        model.load_state_dict({name: torch.from_numpy(w) for name, w in self._weights(version).items()})
        return model


def spans(versions: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(step, first token, one behind the last) of each run of equal stamps."""
    start = 0
    for step, run in itertools.groupby(versions.tolist()):
        end = start + len(list(run))
        yield step, start, end
        start = end
