"""Whether each group that was trained earned what it had to, and was trained once. Pure; reads tokens by itself."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.bench.reward_kills.truth import EPISODE, earned, source_of, turn_earned
from tests.integration.faults.evidence import array, body

TOLERANCE = 1e-5
"""Of the mean reward of an update, which the learner sums in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run left."""

    rows: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl, one an update."""
    payloads: Mapping[str, bytes]
    """The last group that came for each ticket."""
    tickets: Mapping[str, str]
    """Each ticket's state at the end, of those whose ids the store still has."""
    num_forgotten: int = 0
    """Acknowledged tickets that the store only counts."""


@dataclasses.dataclass(kw_only=True)
class Verdict:
    """What the auditor found."""

    num_updates: int = 0
    num_groups: int = 0
    by_source: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Groups."""
    num_responses: int = 0
    num_turns: int = 0
    """Of episodes."""
    wrong_rewards: int = 0
    zero_rewards: int = 0
    """Responses and turns; nothing earns 0 here."""
    trained_twice: int = 0
    lost: int = 0
    """Acknowledged, and in no update."""
    unrecorded: int = 0
    """Trained, and never seen to come into the store."""
    wrong_means: int = 0
    """Updates whose mean reward, as the learner has it, is not that of what its responses had to earn."""
    examples: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not any(
            (self.wrong_rewards, self.zero_rewards, self.trained_twice, self.lost, self.unrecorded, self.wrong_means)
        )


class Characters:
    """The tokenizer of a character model, read from its file."""

    def __init__(self, vocabulary: Mapping[int, str], special: Mapping[int, str], eos: int) -> None:
        """Tokens' texts by their numbers; a number that the model has and the tokenizer hasn't is no text."""
        self._texts, self._special, self._eos = {**vocabulary, **special}, special, eos

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Characters":
        """Of a model's folder."""
        made = json.loads((folder / "tokenizer.json").read_text())
        special = {t["id"]: t["content"] for t in made["added_tokens"]}
        eos = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
        vocabulary = {number: text for text, number in made["model"]["vocab"].items()}
        return cls(vocabulary, special, next(i for i, text in special.items() if text == eos))

    def plain(self, tokens: Sequence[int]) -> str:
        """A response's text: special tokens are none."""
        return "".join(self._texts.get(t, "") for t in tokens if t not in self._special)

    def has_ended(self, tokens: Sequence[int]) -> bool:
        """Returns True if a turn has its end token."""
        return tokens[-1] == self._eos

    def action(self, tokens: Sequence[int]) -> str:
        """A turn's text: special tokens are, but for the one that ends it."""
        return "".join(self._texts.get(t, "") for t in (tokens[:-1] if tokens[-1] == self._eos else tokens))


def audit(evidence: Evidence, characters: Characters) -> Verdict:
    """All checks."""
    trained = [ticket for row in evidence.rows for ticket in row["groups"]]
    twice = [ticket for ticket, count in collections.Counter(trained).items() if count > 1]
    lost = [t for t, state in evidence.tickets.items() if state == "acknowledged" and t not in set(trained)]
    verdict = Verdict(num_updates=len(evidence.rows), num_groups=len(set(trained)))
    forgotten = set(trained) - evidence.tickets.keys()
    verdict.trained_twice = len(twice)
    verdict.lost = len(lost) + max(0, evidence.num_forgotten - len(forgotten))
    verdict.examples += [f"trained twice: {t}" for t in twice[:3]] + [f"lost: {t}" for t in lost[:3]]
    means: dict[str, float] = {}
    for ticket in dict.fromkeys(trained):
        if ticket not in evidence.payloads:
            verdict.unrecorded += 1
            continue
        means[ticket] = _check(body(evidence.payloads[ticket]), characters, verdict)
    for row in evidence.rows:
        wanted = [means.get(ticket, float("nan")) for ticket in row["groups"]]
        if not abs(row["reward/mean"] - float(np.mean(wanted))) < TOLERANCE:
            verdict.wrong_means += 1
            verdict.examples.append(f"step {row['step']}: mean reward {row['reward/mean']}, wanted {np.mean(wanted)}")
    verdict.examples = verdict.examples[:10]
    return verdict


def _check(group: Mapping[str, Any], characters: Characters, verdict: Verdict) -> float:
    """Books a group; returns the mean of what its responses had to earn."""
    source = source_of(characters.plain(array(group["prompt_tokens"]).tolist()))
    verdict.by_source[source] += 1
    wanted: list[float] = []
    for rollout in group["rollouts"]:
        turns = _turns(array(rollout["tokens"]).tolist(), array(rollout["loss_mask"]).tolist())
        given = array(rollout["turn_rewards"]).tolist()
        scores = [(s["value"], s["verdict"]) for s in rollout["scores"]]
        verdict.num_responses += 1
        verdict.zero_rewards += [rollout["reward"], *given, *(value for value, _ in scores)].count(0.0)
        if source == EPISODE:
            verdict.num_turns += len(turns)
            # A turn that its limit cut off is no action: it earns nothing.
            cut = [not characters.has_ended(tokens) for tokens in turns]
            each = [0.0 if cut[i] else turn_earned(i, characters.action(tokens)) for i, tokens in enumerate(turns)]
            verdict.zero_rewards -= sum(cut) + all(cut)
            wanted.append(sum(each))
            is_right = given == each and not scores
        else:
            text = characters.plain([t for tokens in turns for t in tokens])
            wanted.append(earned(source, text))
            is_right = not given and len(turns) == 1 and scores == [(wanted[-1], "ok")]
        if not is_right or rollout["reward"] != wanted[-1]:
            verdict.wrong_rewards += 1
            verdict.examples.append(
                f"{source} {group['ticket_id']}: reward {rollout['reward']} scores {scores} turns {given}, "
                f"wanted {wanted[-1]}"
            )
    return float(np.mean(wanted))


def _turns(tokens: Sequence[int], sampled: Sequence[bool]) -> list[list[int]]:
    """The runs of sampled tokens."""
    turns: list[list[int]] = []
    for i, (token, is_sampled) in enumerate(zip(tokens, sampled, strict=True)):
        if is_sampled and (i == 0 or not sampled[i - 1]):
            turns.append([])
        if is_sampled:
            turns[-1].append(token)
    return turns
