"""Weights of a mixture that follow its sources' rewards."""

from collections.abc import Mapping
from typing import Any

from configs.sections import PromptsConfig


class Curriculum:
    """Keeps each source's running mean reward, and says what its weight is now (`prompts.curriculum`)."""

    def __init__(self, config: PromptsConfig) -> None:
        """No reward was seen yet: the weights are those of the config, or the first stage's."""
        self._config = config
        self._weights = {name: source.weight for name, source in config.sources.items()}
        self._stages = {name: source.stage for name, source in config.sources.items()}
        self._num_groups = dict.fromkeys(self._weights, 0)
        self._rewards = dict.fromkeys(self._weights, 0.0)
        self._stage = min(self._stages.values())

    @property
    def rewards(self) -> dict[str, float]:
        """Each source's running mean reward; of those that had groups."""
        return {name: reward for name, reward in self._rewards.items() if self._num_groups[name]}

    @property
    def stage(self) -> int:
        """The stage that is trained now."""
        return self._stage

    def observe(self, name: str, reward: float) -> None:
        """Takes in the mean reward of a source's group; forgets a source that is not in the config any more."""
        if name not in self._weights:
            return
        self._num_groups[name] += 1
        among = min(self._num_groups[name], self._config.curriculum_groups)
        self._rewards[name] += (reward - self._rewards[name]) / among
        if self._config.curriculum == "stages":
            self._end_stages()

    def weights(self) -> Mapping[str, float]:
        """What each source's weight is now."""
        factor = {"none": _always, "learnable": self._learnable, "stages": self._staged}[self._config.curriculum]
        return {name: weight * factor(name) for name, weight in self._weights.items()}

    def get_state(self) -> dict[str, Any]:
        """The means and the stage; JSON."""
        return {"num_groups": dict(self._num_groups), "rewards": dict(self._rewards), "stage": self._stage}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called; a source that was not there then begins without a reward."""
        for name in self._weights:
            self._num_groups[name] = state["num_groups"].get(name, 0)
            self._rewards[name] = state["rewards"].get(name, 0.0)
        stages = sorted(set(self._stages.values()))
        self._stage = max((s for s in stages if s <= state["stage"]), default=stages[0])

    def _learnable(self, name: str) -> float:
        """4 r (1 - r), the variance of a reward of 0 or 1 over its largest; 1 before there is a reward."""
        if not self._num_groups[name]:
            return 1.0
        reward = min(max(self._rewards[name], 0.0), 1.0)
        return max(4 * reward * (1 - reward), self._config.learnable_floor)

    def _staged(self, name: str) -> float:
        if self._stages[name] == self._stage:
            return 1.0
        return self._config.stage_review if self._stages[name] < self._stage else 0.0

    def _end_stages(self) -> None:
        """Goes on to the next stage once all sources of this one are good enough; never back."""
        later = [s for s in self._stages.values() if s > self._stage]
        if later and all(self._is_passed(n) for n, stage in self._stages.items() if stage == self._stage):
            self._stage = min(later)

    def _is_passed(self, name: str) -> bool:
        enough = self._num_groups[name] >= self._config.curriculum_groups
        return enough and self._rewards[name] >= self._config.stage_reward


def _always(name: str) -> float:
    del name
    return 1.0
