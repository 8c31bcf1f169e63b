"""Progress that an actor hands over when it stops sampling a ticket."""

from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from actor.engine_protocol import PartialSample, Sample
from actor.rewards.scorer import RewardResult
from bridge.progress_types import (
    MAX_ACTORS,
    MAX_TOKENS,
    RequestProgress,
    TicketProgress,
    progress_of,
    prompt_digest,
)
from bridge.rollout_types import Finish, Ticket


def makers(continued: Ticket | None, name: str) -> list[str]:
    """Returns the names behind a group: those whose responses an actor continues, and its own last."""
    progress = None if continued is None else progress_of(continued)
    return [*(other for other in (progress.actors if progress else ()) if other != name), name]


def progress_so_far(
    ticket: Ticket,
    actors: Sequence[str],
    finished: Mapping[int, Sample],
    judged: Mapping[int, RewardResult],
    stopped: Mapping[int, PartialSample],
) -> TicketProgress | None:
    """Returns the progress of a ticket whose sampling was stopped; None if it must restart.

    `actors` are all that sampled any of it (`makers`). `judged` has the known rewards of `finished`. Responses in
    `stopped` have at least one token. `finished`, `judged` and `stopped` are by request index.
    """
    found = {index: _request(index, sample, sample.finish, judged.get(index)) for index, sample in finished.items()}
    found |= {index: _request(index, sample, None, None) for index, sample in stopped.items()}
    if not found:
        return None
    num_tokens = sum(request.tokens.size for request in found.values())
    if len(actors) > MAX_ACTORS or num_tokens > MAX_TOKENS:
        logging.warning("progress is not handed over ticket=%s actors=%d tokens=%d", ticket.id, len(actors), num_tokens)
        return None
    return TicketProgress(
        ticket_id=ticket.id,
        prompt=prompt_digest(ticket),
        actors=tuple(actors),
        requests=tuple(found[index] for index in sorted(found)),
    )


def _request(
    index: int, sample: Sample | PartialSample, finish: Finish | None, judged: RewardResult | None
) -> RequestProgress:
    return RequestProgress(
        index=index,
        tokens=sample.tokens,
        behavior_logprobs=sample.logprobs,
        incarnations=np.asarray([v.incarnation for v in sample.token_versions], np.int32),
        steps=np.asarray([v.step for v in sample.token_versions], np.int32),
        finish=finish,
        reward=judged.reward if judged is not None else None,
        scores=judged.scores if judged is not None else (),
        routed_experts=sample.routed_experts,
    )
