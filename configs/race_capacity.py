"""Capacity checks: races need a slot per request, and a frontier should fill the engines."""

import math

from configs.schema import Config


def num_racing(config: Config) -> int | None:
    """Returns the number of racing requests per short round or window; None without a race.

    In a window, overprovisioned samples race only within their group, whose requests start together.
    """
    rounds = config.rounds
    if config.publish.when == "every":
        return config.sequences if rounds.overprovision_prompts > 1 else None
    if max(rounds.overprovision_prompts, rounds.overprovision_samples) == 1:
        return None
    return rounds.groups_issued * rounds.requests_per_group


def check_race_capacity(
    config: Config, *, num_engines: int, max_num_seqs: int, num_sequences: int | None = None
) -> str | None:
    """Returns a message if not all racing requests can run concurrently; None if they can.

    A race with waiting requests selects by start time instead of length. If num_engines is 0, for unknown, the message
    states how many are required. `num_sequences` counts all engines, by default num_engines * max_num_seqs.
    """
    num_requests = num_racing(config)
    num_sequences = num_engines * max_num_seqs if num_sequences is None else num_sequences
    if num_requests is None or num_requests <= num_sequences:
        return None
    what = "a round" if config.publish.when == "round_end" else "a window"
    wanted = f"{math.ceil(num_requests / max_num_seqs)} engines of {max_num_seqs} sequences"
    if num_engines == 0:
        return (
            f"the {num_requests} requests of {what} race, so all must run concurrently: this requires {wanted} "
            "(actor.max_num_seqs)"
        )
    engines = "one engine" if num_engines == 1 else f"{num_engines} engines"
    return (
        f"with {engines} the {num_requests} requests of {what} race for {num_sequences} slots, and the last to start "
        f"lose regardless of length: this requires {wanted} (actor.num_engines, actor.max_num_seqs)"
    )


def may_be_too_narrow(config: Config, *, num_engines: int) -> str | None:
    """Returns a message if the frontier leaves engine slots unused; None if it fills them."""
    num_requests = config.admission_width * config.rounds.requests_per_group
    num_sequences = max(num_engines, 1) * config.actor.max_num_seqs
    groups = config.rounds.groups_issued
    num_useful = min(num_sequences, groups * config.rounds.requests_per_group)
    if config.admission.policy != "frontier" or config.chooses_width or num_requests >= num_useful:
        return None
    width = -(-num_useful // config.rounds.requests_per_group)
    return (
        f"admission.width ({config.admission_width}) keeps {num_requests} sequences in service, and the engines have "
        f"{num_sequences} slots (actor.max_num_seqs). If more sequences make the engines faster, this schedule is no "
        f"faster than serial. Set admission.width=auto, or at most {width}"
    )
