"""Frontier width of a simulated run, by the rule of real runs (`learner/schedule/frontier_width.py`)."""

import dataclasses

from configs.schema import Config
from launch.tools.plan.profile import Profile
from launch.tools.plan.workload import Lengths
from learner.schedule.frontier_width import WidthSpeeds, too_narrow, with_losers


def with_width(config: Config, profile: Profile) -> Config:
    """Returns the config with the width that a run chooses after its first round, if it chooses one."""
    if not config.chooses_width:
        return config
    return dataclasses.replace(
        config, admission=dataclasses.replace(config.admission, width=chosen_width(config, profile))
    )


def chosen_width(config: Config, profile: Profile) -> int:
    """Returns the width that admission.width=auto selects; with environments, all groups of a round."""
    if _has_environments(config, profile):
        return config.rounds.groups_issued
    return _speeds(config, profile).narrowest(config.rounds.groups_per_update)


def width_line(config: Config, profile: Profile) -> str | None:
    """Returns a line with the chosen width, or a warning if the given width costs speed; None if neither applies."""
    if config.admission.policy != "frontier" or _has_environments(config, profile):
        return None
    speeds, chosen = _speeds(config, profile), chosen_width(config, profile)
    if config.chooses_width:
        return f"admission.width=auto: {chosen} groups, {speeds.share(chosen):.1%} of the engines' full speed"
    warning = too_narrow(speeds, config.admission_width, chosen)
    return warning and f"warning: {warning}"


def _has_environments(config: Config, profile: Profile) -> bool:
    return bool(config.environments_played) or profile.episodes is not None


def _speeds(config: Config, profile: Profile) -> WidthSpeeds:
    """Returns the speeds over the responses of the profile's first round; `chosen_width` of other rounds may differ."""
    rounds, engine, num = config.rounds, profile.engine, profile.num_engines
    lengths = Lengths(profile.response_tokens, profile.prompt_tokens, seed=0)

    def group(problem: int) -> list[int]:
        kept = sorted(lengths.responses(problem, rounds.requests_per_group))[: rounds.samples_per_group]
        return with_losers(kept, rounds.requests_per_group)

    return WidthSpeeds(
        [group(problem) for problem in range(rounds.groups_issued)],
        lambda h: num * engine.throughput(h / num),
        places=num * engine.max_num_seqs,
    )
