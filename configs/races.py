"""What a race wants of the engines (RollPacker section 3)."""

import math

from configs.schema import Config


def too_few_places(config: Config, *, num_engines: int, max_num_seqs: int) -> str | None:
    """What to know if not all requests of a short round can run at once; None if they can, or none race.

    A race finds who is slow only among those that began: of what waits for a place the last to start lose.
    """
    rounds = config.rounds
    if config.publish.when != "round_end" or max(rounds.overprovision_prompts, rounds.overprovision_samples) == 1:
        return None
    num_requests, num_places = rounds.groups_issued * rounds.requests_per_group, num_engines * max_num_seqs
    if num_requests <= num_places:
        return None
    engines = "one engine" if num_engines == 1 else f"{num_engines} engines"
    return (
        f"with {engines} the {num_requests} requests of a round race for {num_places} places, and those that start "
        f"last lose, long or not: it wants {math.ceil(num_requests / max_num_seqs)} engines of {max_num_seqs} "
        "sequences (actor.max_num_seqs)"
    )
