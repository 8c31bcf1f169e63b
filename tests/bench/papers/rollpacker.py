"""RollPacker's Table 2 and Figure 11 in virtual time, from `tests/bench/papers/inputs.py` and nothing else.

All systems compared are colocated: every GPU generates, then every GPU trains. The stream trainer gives half of the
engines up to training before the rollout ends (`learner/schedule/scale_down_criteria.py`).
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from configs.presets import rollpacker
from configs.schema import Config
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile, Lengths
from tests.bench.papers import inputs
from tests.bench.papers.inputs import ETA, Setting

BASELINE, TAIL, REWARD, STREAM = "veRL baseline", "+ tail batching", "+ reward scheduler", "+ stream trainer"
_RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What Table 1 says of everything but the rollout."""

    train_s_per_token_and_param: float
    """Of one GPU."""
    reward_s: float
    """A synchronous step's."""


NO_COSTS = Costs(train_s_per_token_and_param=0.0, reward_s=0.0)


def config_of(
    eta_prompts: float, eta_samples: float, *, streamed: bool = False, num_prompts: int = inputs.P0
) -> Config:
    """128 prompts of 8 responses, one update a round."""
    config = rollpacker.rollpacker("paper")
    rounds = dataclasses.replace(
        config.rounds,
        groups_per_round=num_prompts,
        groups_per_update=num_prompts,
        samples_per_group=inputs.R0,
        overprovision_prompts=eta_prompts,
        overprovision_samples=eta_samples,
        train_start="group_ready" if streamed else "round_complete",
    )
    # The planner has no elastic engines.
    actor = dataclasses.replace(config.actor, elastic=False, max_tensor_parallel_size=0)
    return dataclasses.replace(config, rounds=rounds, actor=actor)


def lengths_of(setting: Setting, prompt_share: float) -> LengthProfile:
    """Figure 2's, to the setting's maximum."""
    return LengthProfile(kind="rollpacker", max_tokens=setting.max_tokens, prompt_share=prompt_share)


def context_tokens(lengths: LengthProfile) -> float:
    """Mean context of a running sequence: a place holds one in proportion to its length, at half of it on average."""
    drawn = Lengths(lengths, lengths, seed=0)
    responses = np.array([drawn.responses(problem, inputs.R0) for problem in range(2000)], np.float64)
    return inputs.PROMPT_TOKENS + float((responses**2).sum() / responses.sum()) / 2


def profile_of(
    setting: Setting, costs: Costs, *, prompt_share: float, reward_s: float, lengths: LengthProfile | None = None
) -> Profile:
    """A setting's GPUs, all of them the engines'; Figure 2's lengths by default."""
    lengths = lengths or lengths_of(setting, prompt_share)
    context = context_tokens(lengths)
    return Profile(
        engine=EngineProfile(
            running=tuple(float(h) for h in _RUNNING),
            tokens_per_s=tuple(h / setting.step_s(h, context) for h in _RUNNING),
            max_num_seqs=inputs.MAX_NUM_SEQS,
            kv_capacity_tokens=setting.kv_capacity_tokens,
            prefill_s_per_token=setting.prefill_s_per_token,
        ),
        response_tokens=lengths,
        prompt_tokens=LengthProfile(kind="samples", samples=(inputs.PROMPT_TOKENS,)),
        learner=LearnerProfile(seconds_per_token=costs.train_s_per_token_and_param * setting.params),
        num_engines=setting.num_engines,
        chips_per_engine=setting.tensor_parallel_size,
        num_learner_chips=0,
        verifier_s=reward_s,
    )


def rollout(setting: Setting, eta_prompts: float, eta_samples: float, *, prompt_share: float, seed: int) -> SimResult:
    """Rounds whose training and rewards take no time."""
    profile = profile_of(setting, NO_COSTS, prompt_share=prompt_share, reward_s=0.0)
    return simulate(config_of(eta_prompts, eta_samples), profile, num_updates=inputs.NUM_ROUNDS, seed=seed)


def costs_of(setting: Setting, *, prompt_share: float, seed: int) -> Costs:
    """Table 1's shares of a synchronous step, in seconds beside this setting's simulated rollout."""
    outcome = rollout(setting, 1.0, 1.0, prompt_share=prompt_share, seed=seed)
    step_s = outcome.step_s / inputs.ROLLOUT_SHARE
    tokens = (outcome.tokens_per_s * outcome.seconds + outcome.num_samples * inputs.PROMPT_TOKENS) / outcome.num_steps
    train_s = step_s * inputs.TRAINING_SHARE
    return Costs(
        train_s_per_token_and_param=train_s * setting.num_gpus / tokens / setting.params,
        reward_s=step_s * inputs.REWARD_SHARE,
    )


def table_2(setting: Setting, costs: Costs, *, prompt_share: float, seed: int) -> dict[str, float]:
    """Mean seconds of a step by row of Table 2; each has what those above it have."""
    rows = {
        BASELINE: (1.0, costs.reward_s, False),
        TAIL: (ETA, costs.reward_s, False),
        REWARD: (ETA, inputs.ASYNC_REWARD_S, False),
        STREAM: (ETA, inputs.ASYNC_REWARD_S, True),
    }
    found = {}
    for name, (eta, reward_s, streamed) in rows.items():
        profile = profile_of(setting, costs, prompt_share=prompt_share, reward_s=reward_s)
        config = config_of(eta, eta, streamed=streamed)
        found[name] = simulate(config, profile, num_updates=inputs.NUM_ROUNDS, seed=seed).step_s
    return found


def speedups(step_s: Mapping[str, float]) -> dict[str, float]:
    """Over the baseline."""
    return {name: step_s[BASELINE] / seconds for name, seconds in step_s.items() if name != BASELINE}


def figure_11(setting: Setting, *, prompt_share: float, seed: int) -> dict[str, float]:
    """Rollout time over that without tail batching, by "R eta", "P eta" and "P, R eta"."""

    def seconds(eta_prompts: float, eta_samples: float) -> float:
        return rollout(setting, eta_prompts, eta_samples, prompt_share=prompt_share, seed=seed).step_s

    base = seconds(1.0, 1.0)
    found = {f"R {eta:g}": seconds(1.0, eta) / base for eta in inputs.FIGURE_11_ETAS}
    found |= {f"P {eta:g}": seconds(eta, 1.0) / base for eta in inputs.FIGURE_11_ETAS}
    return found | {f"P, R {ETA:g}": seconds(ETA, ETA) / base}
