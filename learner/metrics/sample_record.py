"""Selection of groups for the sample log, their JSON records, and mean scores by verifier."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from jaxtyping import Bool, Float32, Int32

from bridge.rollout_types import Group, RewardScore, Rollout, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class PickedGroup:
    """Trained group selected for the sample log."""

    group: Group
    task: Task
    source: str
    """Name of the problem's source in `prompts.mixture`; empty for a single source."""
    advantages: list[Float32[np.ndarray, " T"]] | None
    """Training advantage of each token, one array per response; None with a critic or a teacher."""


class SamplePick:
    """Selected groups of the pending update; a dropped update discards them."""

    def __init__(self, *, groups_per_round: int, kept_per_round: int) -> None:
        self._per_round, self._kept = groups_per_round, min(kept_per_round, groups_per_round)
        self.clear()

    def clear(self) -> None:
        """Discards the selected groups."""
        self._picked: list[PickedGroup] = []

    def wants(self, index: int) -> bool:
        """Returns True if the group at position `index` (from 0) of its round's training order is kept.

        Kept groups are evenly spread over the training order. Late groups have long responses, so the first few would
        be biased.
        """
        return (index + 1) * self._kept // self._per_round > index * self._kept // self._per_round

    def book(self, picked: PickedGroup) -> None:
        """Adds a group of the pending update."""
        self._picked.append(picked)

    def take(self) -> list[PickedGroup]:
        """Returns and clears the selected groups."""
        picked = self._picked
        self.clear()
        return picked


FORMAT = 1
"""Format version; increases when a field changes meaning or is removed."""
MAX_RESPONSES = 8
"""Maximum responses kept per group."""
MAX_CHARS = 4000
"""Maximum characters of a prompt or response; longer ones lose their middle."""
MAX_TURNS = 64
"""Maximum parts kept per episode; longer episodes keep the first and last half of that number."""
MAX_METADATA = 500
"""Maximum characters of a task's metadata."""
_MIN_TURN_CHARS = 100


Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]


def trained_record(picked: PickedGroup, *, step: int, decode: Decode) -> Json:
    """Returns the record of a group that trained in the update to `step`.

    Token lag is relative to step - 1, the weights at the start of the update.
    """
    group = picked.group
    about = {"kind": "train", "set": "", "step": step, "source": picked.source}
    return _record(about, group, picked.task, picked.advantages, learner_step=step - 1, decode=decode)


def evaluated_record(group: Group, task: Task, *, set_name: str, step: int, decode: Decode) -> Json:
    """Returns the record of a group of a set's evaluation on the weights of `step`."""
    about = {"kind": "eval", "set": set_name, "step": step, "source": ""}
    return _record(about, group, task, None, learner_step=None, decode=decode)


def _record(
    about: Json,
    group: Group,
    task: Task,
    advantages: list[Float32[np.ndarray, " T"]] | None,
    *,
    learner_step: int | None,
    decode: Decode,
) -> Json:
    shown = chosen([r.reward for r in group.rollouts], limit=MAX_RESPONSES)
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
        "prompt": text_of(group.prompt_tokens, decode, MAX_CHARS),
        "prompt_tokens": group.prompt_tokens.size,
        "answer": cut(task.answer, MAX_CHARS),
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
                ),
            }
            for i in shown
        ],
    }


def chosen(rewards: Sequence[float], *, limit: int) -> list[int]:
    """Returns up to `limit` response indices in order: best, worst, and evenly spaced by reward between."""
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
        return record | {"text": text_of(rollout.tokens, decode, MAX_CHARS)}
    return record | {"turns": _turns(rollout, starts, decode), "num_parts": len(starts)}


def turn_starts(sampled: Bool[np.ndarray, " T"]) -> list[int]:
    """Returns the start indices of a response's parts: runs of sampled or of observed tokens."""
    return [0, *(np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1).tolist()]


def _turns(rollout: Rollout, starts: list[int], decode: Decode) -> list[Json]:
    ends = [*starts[1:], rollout.tokens.size]
    parts = list(zip(starts, ends, strict=True))
    if len(parts) > MAX_TURNS:
        parts = parts[: MAX_TURNS // 2] + parts[-MAX_TURNS // 2 :]
    each = max(_MIN_TURN_CHARS, MAX_CHARS // len(parts))
    return [
        {
            "by": "policy" if rollout.loss_mask[start] else "environment",
            "text": text_of(rollout.tokens[start:end], decode, each),
        }
        for start, end in parts
    ]


def text_of(tokens: Int32[np.ndarray, " T"], decode: Decode, chars: int) -> str:
    """Returns the text of tokens with special tokens, shortened in the middle to about `chars` characters.

    Decodes at most about `chars` tokens.
    """
    if tokens.size <= chars:
        return cut(decode(tokens.tolist()), chars)
    half = chars // 2
    head, tail = decode(tokens[:half].tolist())[:half], decode(tokens[-half:].tolist())[-half:]
    return f"{head} [... of {tokens.size} tokens the middle is left out ...] {tail}"


def cut(text: str, chars: int) -> str:
    """Returns the text, shortened in the middle to about `chars` characters with a note of the number removed."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def mean_scores(scores: Iterable[RewardScore]) -> dict[str, float]:
    """Returns the mean score by verifier, before weighting."""
    values: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for score in scores:
        values[score.name].append(score.value)
    return {name: float(np.mean(of_verifier)) for name, of_verifier in sorted(values.items())}


def is_episode(rollout: Rollout) -> bool:
    """Returns True if an environment rewarded the response per turn, even with 0."""
    return rollout.turn_rewards.size > 0
