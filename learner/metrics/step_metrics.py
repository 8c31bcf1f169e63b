"""Reward metrics of an update: verdicts, scores, turns and shaping of its responses.

They cover only the pending update. A dropped update discards them, and checkpoints, which are made between updates, do
not contain them.
"""

import collections
from typing import get_args

import numpy as np

from bridge.rollout_types import Group, RewardScore, Task, Verdict
from configs.sections import LossConfig
from learner.metrics.sample_record import is_episode, mean_scores
from learner.model.routing_replay import ExpertLoad, RoutingShape
from learner.objective.reward_shaping import num_sampled, shaping_parts


class RewardMetrics:
    """Accumulator of an update's verdicts, scores, turns, shaping parts and expert load."""

    def __init__(self, config: LossConfig, *, max_response_tokens: int, routing: RoutingShape | None = None) -> None:
        self._config, self._max_response_tokens = config, max_response_tokens
        self._expert_load = None if routing is None else ExpertLoad(routing)
        self.clear()

    def clear(self) -> None:
        """Discards the accumulated values, after an update is made or dropped."""
        if self._expert_load is not None:
            self._expert_load.clear()
        self._scores: list[RewardScore] = []
        self._num_unscored = 0
        self._turns: list[int] = []
        """Number of turns, per episode."""
        self._turn_rewards: list[float] = []
        """Sum of turn rewards, per episode."""
        self._observed: list[int] = []
        """Observed tokens, per response."""
        self._thinking: list[tuple[int, bool]] = []
        """(thinking tokens, True if the thinking is unfinished), per response."""
        self._shaping: collections.defaultdict[str, list[float]] = collections.defaultdict(list)

    def add(self, group: Group, task: Task) -> None:
        """Adds a trained group and the task that scored its responses."""
        if self._expert_load is not None:
            self._expert_load.add(group)
        lengths = np.array([num_sampled(r) for r in group.rollouts])
        for rollout, num in zip(group.rollouts, lengths.tolist(), strict=True):
            self._scores += rollout.scores
            self._num_unscored += bool(task.rewards) and not rollout.scores
            self._observed.append(rollout.tokens.size - num)
            self._thinking.append((rollout.num_thinking_tokens, not rollout.is_thinking_finished))
            if is_episode(rollout):
                self._turns.append(rollout.turn_rewards.size)
                self._turn_rewards.append(float(rollout.turn_rewards.sum(dtype=np.float64)))
        rewards = np.array([r.reward for r in group.rollouts], np.float64)
        for name, part in shaping_parts(rewards, lengths, self._config, self._max_response_tokens).items():
            self._shaping[name] += part.tolist()

    def take(self) -> dict[str, float]:
        """Returns and clears the metrics, named as in learner/metrics/metric_names.py."""
        verdicts = collections.Counter(score.verdict for score in self._scores)
        found = {f"verdicts/{kind}": float(verdicts[kind]) for kind in get_args(Verdict)}
        found["verdicts/unscored"] = float(self._num_unscored)
        found |= {f"rewards/{name}": score for name, score in mean_scores(self._scores).items()}
        found |= {f"reward/{name}": float(np.mean(values)) for name, values in self._shaping.items()}
        if self._turns:
            found["turns/mean"] = float(np.mean(self._turns))
            found["turns/reward"] = float(np.mean(self._turn_rewards))
        if any(self._observed):
            found["response/observation_tokens"] = float(np.mean(self._observed))
        if self._thinking:
            tokens, unfinished = np.mean(self._thinking, axis=0).tolist()
            found |= {"response/thinking_tokens": tokens, "response/thinking_unfinished": unfinished}
        if self._expert_load is not None:
            found |= self._expert_load.metrics
        self.clear()
        return found
