"""An evaluation's groups to metrics and JSON."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from bridge.rollout_types import Group, Rollout, Verdict
from learner.data.problem import Problem
from learner.evaluation import estimators
from learner.evaluation.estimators import Estimate
from learner.evaluation.eval_sets import ProblemSet
from learner.objective.scores import is_episode, mean_scores

_TOLERANCE = 1e-6
"""Of a reward that is a sum of weighted scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What an evaluation of one set says."""

    k: int
    """Samples a problem."""
    num_problems: int
    """With their samples; the estimates are over these."""
    num_left_out: int
    """Nobody could make a group for."""
    estimates: Mapping[str, Estimate]
    """avg@k, pass@1, pass@2, pass@4, ..., pass@k, and maj@k of two samples or more."""
    notes: tuple[str, ...]
    """What is not there, and why."""
    scores: Mapping[str, float]
    """By verifier: the mean of its scores, before they are weighted."""
    verdicts: Mapping[str, int]
    """Of the verifiers, by kind; `unscored`: responses that none was asked about."""
    num_truncated: int
    """Responses that a limit of tokens or turns cut off."""
    mean_response_tokens: float
    """That were sampled."""
    mean_thinking_tokens: float
    """Tokens of thinking among them."""
    unfinished: float
    """Fraction of the responses that end within their thinking."""
    mean_turns: float | None
    """Of episodes; None where there are none."""
    first_step: int
    """Of the oldest weights behind any token."""
    last_step: int
    """Of the newest."""

    @property
    def reward(self) -> float:
        """The mean reward."""
        return self.estimates[f"avg@{self.k}"].value

    @property
    def truncated(self) -> float:
        """Fraction of the responses that were cut off."""
        return self.num_truncated / (self.num_problems * self.k)


def summarize(
    groups: Sequence[Group], *, num_problems: int, pass_reward: float, reads_answers: bool = False
) -> Summary:
    """The numbers of an evaluation.

    Args:
      groups: one a problem, each of k samples; at least one.
      num_problems: that were asked; some may be left out.
      pass_reward: a response with at least this reward passes.
      reads_answers: the problems' verifiers are known to say which answer they read, should none of them be asked.

    Raises:
      ValueError: there is no group, or they are of different sizes.
    """
    sizes = {len(g.rollouts) for g in groups}
    if len(sizes) != 1:
        raise ValueError(f"an evaluation wants groups of one size, got sizes {sorted(sizes)}")
    (k,) = sizes
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = np.array([[r.reward for r in g.rollouts] for g in groups], np.float64)
    passed = rewards >= pass_reward - _TOLERANCE
    estimates = {f"avg@{k}": estimators.avg_at_k(rewards)}
    estimates |= {f"pass@{j}": estimators.pass_at_j(passed, j) for j in estimators.sizes_of_pass(k)}
    notes: list[str] = []
    if k > 1:
        if silent := _without_answers(rollouts, reads_answers=reads_answers):
            notes.append(f"maj@{k} is not there: {silent}")
        else:
            answers = [[answer_of(r) or "" for r in g.rollouts] for g in groups]
            estimates[f"maj@{k}"] = estimators.maj_at_k(answers, passed)
    turns = [r.turn_rewards.size for r in rollouts if is_episode(r)]
    return Summary(
        k=k,
        num_problems=len(groups),
        num_left_out=num_problems - len(groups),
        estimates=estimates,
        notes=tuple(notes),
        scores=mean_scores(score for r in rollouts for score in r.scores),
        verdicts=_verdicts(rollouts),
        num_truncated=sum(r.finish == "length" for r in rollouts),
        mean_response_tokens=float(np.mean([np.count_nonzero(r.loss_mask) for r in rollouts])),
        mean_thinking_tokens=float(np.mean([r.num_thinking_tokens for r in rollouts])),
        unfinished=float(np.mean([not r.is_thinking_finished for r in rollouts])),
        mean_turns=float(np.mean(turns)) if turns else None,
        first_step=min(g.min_step for g in groups),
        last_step=max(g.max_step for g in groups),
    )


def answer_of(rollout: Rollout) -> str | None:
    """The answer that the first of its verifiers that reads answers read; None if none of them does, or was asked."""
    return next((score.answer for score in rollout.scores if score.answer is not None), None)


def _without_answers(rollouts: Sequence[Rollout], *, reads_answers: bool) -> str:
    """Why responses can't vote; empty if they can. One that was cut off and not judged does not vote."""
    judged = [r for r in rollouts if r.scores]
    if not judged:
        return "" if reads_answers else "no response was judged by a verifier"
    silent = sorted({score.name for r in judged if answer_of(r) is None for score in r.scores})
    return f"{', '.join(silent)} does not say which answer a response gives" if silent else ""


def _verdicts(rollouts: Sequence[Rollout]) -> dict[str, int]:
    kinds = [score.verdict for r in rollouts for score in r.scores]
    counts = {kind: kinds.count(kind) for kind in get_args(Verdict)}
    return counts | {"unscored": sum(not r.scores and not is_episode(r) for r in rollouts)}


def metrics_of(name: str, summary: Summary) -> dict[str, float]:
    """The rows of a set that is not the held-out one, by the names of learner/metrics/metric_names.py."""
    return {
        **estimate_metrics(name, summary),
        f"eval/{name}/unscored_problems": summary.num_left_out,
        f"eval/{name}/version": summary.first_step,
        f"eval/{name}/last_version": summary.last_step,
        f"eval/{name}/response_tokens": summary.mean_response_tokens,
        f"eval/{name}/thinking_tokens": summary.mean_thinking_tokens,
        f"eval/{name}/thinking_unfinished": summary.unfinished,
        f"eval/{name}/truncated": summary.truncated,
        **({f"eval/{name}/turns": summary.mean_turns} if summary.mean_turns is not None else {}),
        **{f"eval/{name}/rewards/{verifier}": score for verifier, score in summary.scores.items()},
    }


def held_out_metrics(name: str, summary: Summary) -> dict[str, float]:
    """Those of the held-out set, whose plain numbers have no name of a set in theirs."""
    named = metrics_of(name, summary)
    plain = {f"eval/{key.removeprefix(f'eval/{name}/')}": value for key, value in named.items() if "@" not in key}
    return {
        "eval/reward": summary.reward,
        "eval/reward_stderr": summary.estimates[f"avg@{summary.k}"].stderr,
        **plain,
        **estimate_metrics(name, summary),
    }


def estimate_metrics(name: str, summary: Summary) -> dict[str, float]:
    """The estimates and their standard errors, as `eval/NAME/pass@4` and `eval/NAME/pass@4_stderr`."""
    found: dict[str, float] = {}
    for what, estimate in summary.estimates.items():
        found |= {f"eval/{name}/{what}": estimate.value, f"eval/{name}/{what}_stderr": estimate.stderr}
    return found


FORMAT = 1
"""Goes up when a field changes its meaning or goes away."""
MAX_CHARS = 8_000
"""Of a prompt or a response; a longer one is cut in its middle."""
MAX_SHOWN_SAMPLES = 8
"""Responses of a problem that are kept."""


Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]


def result_of(summary: Summary) -> Json:
    """A summary as JSON; NaN is null."""
    return {
        "k": summary.k,
        "problems": summary.num_problems,
        "left_out": summary.num_left_out,
        "metrics": {
            name: {"value": _number(e.value), "stderr": _number(e.stderr)} for name, e in summary.estimates.items()
        },
        "notes": list(summary.notes),
        "scores": {name: _number(score) for name, score in summary.scores.items()},
        "verdicts": dict(summary.verdicts),
        "truncated": summary.num_truncated,
        "response_tokens": _number(summary.mean_response_tokens),
        "thinking_tokens": _number(summary.mean_thinking_tokens),
        "thinking_unfinished": _number(summary.unfinished),
        "turns": _number(summary.mean_turns),
        "version": summary.first_step,
        "last_version": summary.last_step,
    }


def asked_of(one: ProblemSet) -> Json:
    """How a set was asked."""
    how = one.config
    return {
        "set": one.name,
        "source": how.path or how.task or how.environment or "held-out problems of prompts",
        "temperature": how.temperature,
        "top_p": how.top_p,
        "max_tokens": how.max_tokens,
        "pass_reward": how.pass_reward,
    }


def samples_of(
    problems: Mapping[int, Problem], groups: Mapping[int, Group], decode: Decode, *, limit: int
) -> list[Json]:
    """What is shown of some problems, by their number: the first, the last and what lies evenly between.

    Args:
      problems: by number.
      groups: their groups, by the same number.
      decode: from tokens to text.
      limit: problems at most.
    """
    there = sorted(groups)
    chosen = there if len(there) <= limit else [there[i] for i in np.linspace(0, len(there) - 1, limit).astype(int)]
    return [_shown(number, problems[number], groups[number], decode) for number in chosen if limit]


def _shown(number: int, problem: Problem, group: Group, decode: Decode) -> Json:
    return {
        "problem": number,
        "prompt": _cut(problem.question),
        "answer": _cut(problem.task.answer),
        "responses": [
            {
                "text": _cut(decode(r.tokens.tolist())),
                "reward": r.reward,
                "scores": {score.name: score.value for score in r.scores},
                "verdicts": {score.name: score.verdict for score in r.scores},
                "answer": answer_of(r),
                "finish": r.finish,
                "tokens": int(np.count_nonzero(r.loss_mask)),
                "thinking_tokens": r.num_thinking_tokens,
                "turns": r.num_turns,
                "version": int(r.token_versions[0]),
                "last_version": int(r.token_versions[-1]),
            }
            for r in group.rollouts[:MAX_SHOWN_SAMPLES]
        ],
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
