"""Micro-batches of supervised rows: each row is a group of its completions, packed like any other group."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.rollout_types import Group, Rollout
from configs.schema import Config
from configs.sections import PackingConfig
from learner.data.problem import Problem
from learner.data.prompt_stream import PromptStream
from learner.update.auto_shape import AutoShape
from learner.update.packing import MicroBatch, pack_groups


def group_of(problem: Problem) -> Group:
    """Returns a supervised row as a group; nothing sampled it, so its logprobs, versions and rewards are 0."""

    def rollout(tokens: np.ndarray, loss_mask: np.ndarray) -> Rollout:
        return Rollout(
            tokens=tokens,
            loss_mask=loss_mask,
            behavior_logprobs=np.zeros(tokens.size, np.float32),
            token_versions=np.zeros(tokens.size, np.int32),
            finish="stop",
            reward=0.0,
        )

    return Group(
        ticket_id="row",
        kind="train",
        round=0,
        order=0,
        prompt_tokens=problem.prompt_tokens,
        rollouts=tuple(rollout(c.tokens, c.loss_mask) for c in problem.completions),
        incarnation=0,
        actor="dataset",
        started_s=0.0,
        finished_s=0.0,
    )


def pack_examples(problems: Sequence[Problem], config: Config, packing: PackingConfig) -> list[MicroBatch]:
    """Packs supervised rows into micro-batches of `packing`'s shape; the last one ends the update."""
    return pack_groups(
        [group_of(problem) for problem in problems],
        packing=packing,
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        ends_update=True,
        ends_round=True,
    )


class ExampleStream:
    """Endless updates of supervised rows, with a position that can be saved and restored between updates."""

    def __init__(self, config: Config, prompts: PromptStream) -> None:
        self._config, self._prompts = config, prompts
        self._shape = AutoShape(config)

    @property
    def packing(self) -> PackingConfig:
        """Current shape of a micro-batch."""
        return self._shape.packing

    def next_update(self) -> list[MicroBatch]:
        """Returns the micro-batches of the next `sft.rows_per_update` rows."""
        problems = [next(self._prompts) for _ in range(self._config.sft.rows_per_update)]
        packing = self._shape.choose([group_of(problem) for problem in problems], ends_update=True)
        return pack_examples(problems, self._config, packing)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the rows (`PromptStream.metrics`)."""
        return self._prompts.metrics()

    def get_state(self) -> dict[str, Any]:
        """Returns the position as JSON values."""
        return {"prompts": self._prompts.get_state(), "packing": self._shape.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved position; raises ValueError if the rows differ."""
        self._prompts.set_state(state["prompts"])
        self._shape.set_state(state["packing"])
