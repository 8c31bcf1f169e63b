"""Small configs and profiles whose outcome can be worked out by hand."""

import dataclasses
from typing import Any

from configs import schema, sections
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile, PublishProfile
from launch.tools.plan.workload import LengthProfile


def lengths(*tokens: int) -> LengthProfile:
    return LengthProfile(kind="samples", samples=tokens)


def profile_of(**fields) -> Profile:
    """One engine at 10 tokens/s a sequence whatever runs, responses of 100 tokens, prompts of 1, 0.01 s a token."""
    defaults: dict[str, Any] = dict(
        engine=EngineProfile(running=(64.0,), tokens_per_s=(640.0,), max_num_seqs=64),
        response_tokens=lengths(100),
        prompt_tokens=lengths(1),
        learner=LearnerProfile(seconds_per_token=0.01),
    )
    return Profile(**(defaults | fields))


def publishing(**fields) -> PublishProfile:
    return PublishProfile(**fields)


def by_rounds(R=8, K=2, U=2, *, rounds=None, admission=None, **publish) -> schema.Config:
    sizes: dict[str, Any] = dict(groups_per_round=R, samples_per_group=K, groups_per_update=U) | (rounds or {})
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=R // U),
        rounds=sections.RoundsConfig(**sizes),
        admission=sections.AdmissionConfig(**(admission or {})),
        publish=sections.PublishConfig(when="round_end", **publish),
    )


def by_window(U=2, K=2, *, rounds=None, admission=None, **publish) -> schema.Config:
    config = by_rounds(R=4 * U, K=K, U=U)
    return dataclasses.replace(
        config,
        rounds=dataclasses.replace(config.rounds, **(rounds or {})),
        admission=sections.AdmissionConfig(policy="window", **(admission or {})),
        publish=sections.PublishConfig(when="every", **publish),
    )
