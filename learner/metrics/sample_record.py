"""Which groups are kept, and a group as one line of text JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from jaxtyping import Bool, Float32, Int32

from bridge.rollout_types import Group, Rollout, Task
from configs.sections import SamplesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PickedGroup:
    """A trained group that is kept."""

    group: Group
    task: Task
    source: str
    """Name of its problem's source in `prompts.mixture`; empty where there is one."""
    advantages: list[Float32[np.ndarray, " T"]]
    """Of each token of each response, as they train."""


class SamplePick:
    """The groups of the update being filled that are kept; a dropped update takes them along."""

    def __init__(self, *, groups_per_round: int, kept_per_round: int) -> None:
        """Nothing is booked."""
        self._per_round, self._kept = groups_per_round, min(kept_per_round, groups_per_round)
        self.clear()

    def clear(self) -> None:
        """Forgets what is booked."""
        self._picked: list[PickedGroup] = []

    def wants(self, index: int) -> bool:
        """Whether the group trained as number `index` of its round, from 0, is kept.

        They lie evenly in the order of training: late groups are long ones, so the first few would not do.
        """
        return (index + 1) * self._kept // self._per_round > index * self._kept // self._per_round

    def book(self, picked: PickedGroup) -> None:
        """Keeps a group of the update being filled."""
        self._picked.append(picked)

    def take(self) -> list[PickedGroup]:
        """What is booked; forgets it."""
        picked = self._picked
        self.clear()
        return picked


FORMAT = 1
"""Goes up when a field changes its meaning or goes away."""
MAX_TURNS = 64
"""Parts of an episode that are kept; of more the first and the last half."""
MAX_METADATA = 500
"""Characters of a task's metadata."""
_MIN_TURN_CHARS = 100


Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]


def trained_record(picked: PickedGroup, *, step: int, decode: Decode, config: SamplesConfig) -> Json:
    """A group that trained in the update that made `step`.

    The lag of its tokens is counted from step - 1, the weights that the update began with.
    """
    group = picked.group
    about = {"kind": "train", "set": "", "step": step, "source": picked.source}
    return _record(about, group, picked.task, picked.advantages, learner_step=step - 1, decode=decode, config=config)


def evaluated_record(
    group: Group, task: Task, *, set_name: str, step: int, decode: Decode, config: SamplesConfig
) -> Json:
    """A group of the evaluation of a set by the weights of `step`."""
    about = {"kind": "eval", "set": set_name, "step": step, "source": ""}
    return _record(about, group, task, None, learner_step=None, decode=decode, config=config)


def _record(
    about: Json,
    group: Group,
    task: Task,
    advantages: list[Float32[np.ndarray, " T"]] | None,
    *,
    learner_step: int | None,
    decode: Decode,
    config: SamplesConfig,
) -> Json:
    shown = chosen([r.reward for r in group.rollouts], limit=config.responses)
    return {
        "format": FORMAT,
        **about,
        "incarnation": group.incarnation,
        "round": group.round,
        "ticket": group.ticket_id,
        "order": group.order,
        "prompt_id": blake3(group.prompt_tokens.tobytes()).hexdigest()[:12],
        "environment": task.environment,
        "started_s": round(group.started_s, 3),
        "finished_s": round(group.finished_s, 3),
        "prompt": text_of(group.prompt_tokens, decode, config.chars),
        "prompt_tokens": group.prompt_tokens.size,
        "answer": cut(task.answer, config.chars),
        "metadata": cut(task.metadata, MAX_METADATA),
        "num_responses": len(group.rollouts),
        "responses": [
            {
                "actor": group.makers[i],
                **_response(
                    group.rollouts[i],
                    None if advantages is None else advantages[i],
                    learner_step=learner_step,
                    decode=decode,
                    config=config,
                ),
            }
            for i in shown
        ],
    }


def chosen(rewards: Sequence[float], *, limit: int) -> list[int]:
    """Indices of `limit` responses at most, in their order: the best, the worst, and evenly between by reward."""
    if len(rewards) <= limit:
        return list(range(len(rewards)))
    by_reward = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    return sorted(by_reward[i] for i in np.linspace(0, len(rewards) - 1, limit).astype(int))


def _response(
    rollout: Rollout,
    advantages: Float32[np.ndarray, " T"] | None,
    *,
    learner_step: int | None,
    decode: Decode,
    config: SamplesConfig,
) -> Json:
    versions = rollout.token_versions[rollout.loss_mask]
    num_sampled = int(rollout.loss_mask.sum())
    record: Json = {
        "finish": rollout.finish,
        "tokens": num_sampled,
        "observed_tokens": rollout.tokens.size - num_sampled,
        "thinking_tokens": rollout.num_thinking_tokens,
        "reward": rollout.reward,
        "scores": {s.name: {"value": s.value, "verdict": s.verdict} for s in rollout.scores},
        "turn_rewards": [float(r) for r in rollout.turn_rewards],
        "min_version": int(versions.min()),
        "max_version": int(versions.max()),
        "lag": None if learner_step is None else round(float((learner_step - versions).mean()), 4),
        "lag_max": None if learner_step is None else int(learner_step - versions.min()),
        "advantage": None if advantages is None else round(float(advantages[rollout.loss_mask].mean()), 6),
    }
    starts = turn_starts(rollout.loss_mask)
    if advantages is not None and not np.all(advantages[rollout.loss_mask] == advantages[rollout.loss_mask][0]):
        record["turn_advantages"] = [round(float(advantages[i]), 6) for i in starts if rollout.loss_mask[i]]
    if rollout.loss_mask.all():
        return record | {"text": text_of(rollout.tokens, decode, config.chars)}
    return record | {"turns": _turns(rollout, starts, decode, config.chars), "num_parts": len(starts)}


def turn_starts(sampled: Bool[np.ndarray, " T"]) -> list[int]:
    """Where the parts of a response begin: runs of tokens that were sampled, or observed."""
    return [0, *(np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1).tolist()]


def _turns(rollout: Rollout, starts: list[int], decode: Decode, chars: int) -> list[Json]:
    """The parts of an episode: who said it, and what."""
    ends = [*starts[1:], rollout.tokens.size]
    parts = list(zip(starts, ends, strict=True))
    if len(parts) > MAX_TURNS:
        parts = parts[: MAX_TURNS // 2] + parts[-MAX_TURNS // 2 :]
    each = max(_MIN_TURN_CHARS, chars // len(parts))
    return [
        {
            "by": "policy" if rollout.loss_mask[start] else "environment",
            "text": text_of(rollout.tokens[start:end], decode, each),
        }
        for start, end in parts
    ]


def text_of(tokens: Int32[np.ndarray, " T"], decode: Decode, chars: int) -> str:
    """The text of tokens, special ones too, cut in its middle to about `chars` characters.

    Of very many tokens only as many are decoded as may be shown.
    """
    if tokens.size <= chars:
        return cut(decode(tokens.tolist()), chars)
    half = chars // 2
    head, tail = decode(tokens[:half].tolist())[:half], decode(tokens[-half:].tolist())[-half:]
    return f"{head} [... of {tokens.size} tokens the middle is left out ...] {tail}"


def cut(text: str, chars: int) -> str:
    """The text, or where it is longer its beginning and end, with how much is missing between."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
