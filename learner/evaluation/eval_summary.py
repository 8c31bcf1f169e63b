"""Conversion of an evaluation's groups to metrics and JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from bridge.rollout_types import Group, Rollout, Verdict
from learner.data.problem import Problem
from learner.evaluation import estimators
from learner.evaluation.estimators import Estimate
from learner.evaluation.eval_sets import ProblemSet
from learner.metrics.sample_record import Decode, Json, cut, is_episode, mean_scores

_TOLERANCE = 1e-6
"""Tolerance of a reward that is a sum of weighted scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of an evaluation of one set."""

    k: int
    """Samples per problem."""
    num_problems: int
    """Problems with samples; the estimates are over these."""
    num_left_out: int
    """Problems without a group, because no actor could complete one."""
    estimates: Mapping[str, Estimate]
    """avg@k, pass@1, pass@2, pass@4, ..., pass@k, and maj@k if k is 2 or more."""
    notes: tuple[str, ...]
    """Estimates that are missing, and the reasons."""
    scores: Mapping[str, float]
    """Mean score by verifier, before weighting."""
    verdicts: Mapping[str, int]
    """Number of verdicts by kind; `unscored` counts responses that no verifier scored."""
    num_truncated: int
    """Responses truncated by a token or turn limit."""
    mean_response_tokens: float
    """Mean number of sampled tokens per response."""
    mean_thinking_tokens: float
    """Mean number of thinking tokens per response."""
    unfinished: float
    """Fraction of responses that end inside their thinking."""
    mean_turns: float | None
    """Mean number of turns per episode; None without episodes."""
    first_step: int
    """Step of the oldest weights of any token."""
    last_step: int
    """Step of the newest weights of any token."""

    @property
    def reward(self) -> float:
        """Mean reward."""
        return self.estimates[f"avg@{self.k}"].value

    @property
    def truncated(self) -> float:
        """Fraction of responses that were truncated."""
        return self.num_truncated / (self.num_problems * self.k)


def summarize(
    groups: Sequence[Group], *, num_problems: int, pass_reward: float, reads_answers: bool = False
) -> Summary:
    """Returns the results of an evaluation of `num_problems` problems from the groups of those that have one.

    Responses with a reward of at least `pass_reward` pass. `reads_answers` says if the problems' verifiers report
    answers, which matters only if no response was scored. Raises ValueError if there is no group, or groups differ in
    size.
    """
    sizes = {len(g.rollouts) for g in groups}
    if len(sizes) != 1:
        raise ValueError(f"evaluation groups must have one size, got sizes {sorted(sizes)}")
    (k,) = sizes
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = np.array([[r.reward for r in g.rollouts] for g in groups], np.float64)
    passed = rewards >= pass_reward - _TOLERANCE
    estimates = {f"avg@{k}": estimators.avg_at_k(rewards)}
    estimates |= {f"pass@{j}": estimators.pass_at_j(passed, j) for j in estimators.sizes_of_pass(k)}
    notes: list[str] = []
    if k > 1:
        if silent := _without_answers(rollouts, reads_answers=reads_answers):
            notes.append(f"maj@{k} is missing: {silent}")
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
    """Returns the answer from the first verifier that reports one, or None."""
    return next((score.answer for score in rollout.scores if score.answer is not None), None)


def _without_answers(rollouts: Sequence[Rollout], *, reads_answers: bool) -> str:
    """Returns the reason why responses cannot vote, or "". Responses that were not scored do not vote."""
    judged = [r for r in rollouts if r.scores]
    if not judged:
        return "" if reads_answers else "no verifier scored a response"
    silent = sorted({score.name for r in judged if answer_of(r) is None for score in r.scores})
    return f"{', '.join(silent)} does not report a response's answer" if silent else ""


def _verdicts(rollouts: Sequence[Rollout]) -> dict[str, int]:
    kinds = [score.verdict for r in rollouts for score in r.scores]
    counts = {kind: kinds.count(kind) for kind in get_args(Verdict)}
    return counts | {"unscored": sum(not r.scores and not is_episode(r) for r in rollouts)}


def metrics_of(name: str, summary: Summary) -> dict[str, float]:
    """Returns the metrics of a set other than the held-out one, named as in learner/metrics/metric_names.py."""
    found: dict[str, float] = {}
    for what, estimate in summary.estimates.items():
        found |= {f"eval/{name}/{what}": estimate.value, f"eval/{name}/{what}_stderr": estimate.stderr}
    return {
        **found,
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
    """Returns the metrics of the held-out set; all but its estimates have no set name."""
    named = metrics_of(name, summary)
    plain = {key if "@" in key else f"eval/{key.removeprefix(f'eval/{name}/')}": v for key, v in named.items()}
    stderr = summary.estimates[f"avg@{summary.k}"].stderr
    return {"eval/reward": summary.reward, "eval/reward_stderr": stderr, **plain}


FORMAT = 1
"""Format version; increases when a field changes meaning or is removed."""
MAX_CHARS = 8_000
"""Maximum characters of a prompt or response; longer ones are shortened in the middle."""
MAX_SHOWN_SAMPLES = 8
"""Maximum number of responses kept per problem."""


def result_of(summary: Summary) -> Json:
    """Returns a summary as JSON values, with NaN as null."""
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
    """Returns the sampling settings of a set as JSON values."""
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
    """Returns samples of up to `limit` problems by number, evenly spread from first to last, as JSON values."""
    there = sorted(groups)
    chosen = there if len(there) <= limit else [there[i] for i in np.linspace(0, len(there) - 1, limit).astype(int)]
    return [_shown(number, problems[number], groups[number], decode) for number in chosen if limit]


def _shown(number: int, problem: Problem, group: Group, decode: Decode) -> Json:
    return {
        "problem": number,
        "prompt": cut(problem.question, MAX_CHARS),
        "answer": cut(problem.task.answer, MAX_CHARS),
        "responses": [
            {
                "text": cut(decode(r.tokens.tolist()), MAX_CHARS),
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


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
