"""Progress of a ticket that one actor hands over to another: what was sampled of its group, and the rewards so far.

An actor that leaves or restarts returns its tickets with their progress. The next actor computes keys and values of
prompt and tokens again and continues (RollPacker section 4.4). Tokens, logprobs and versions stay as they were sampled.
"""

import dataclasses
import math
from typing import Annotated

import numpy as np
from blake3 import blake3
from jaxtyping import Float32, Int32
from msgspec import UNSET, Meta, UnsetType

from bridge.rollout_types import MAX_REWARD_PARTS, MAX_SAMPLES, Finish, RewardScore, Ticket, Version
from bridge.routed_experts import RoutedExperts, check_routing
from bridge.validation import check_choice, check_name, check_vector

MAX_ACTORS = 8
"""Most actors that one ticket's progress may come from, which bounds the names that the store keeps. A further actor
hands nothing over, so the ticket keeps the progress before."""

MAX_TOKENS = 2**21
"""Most tokens of one ticket's progress. A token takes 16 bytes, and a message at most 64 MiB (`codec.MAX_BYTES`). Their
routing is bounded by the run's config (`learner.model.routing_replay.routing_shape`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """Progress of one request."""

    index: int
    """Number of the request in its ticket."""
    tokens: Int32[np.ndarray, " T"]
    behavior_logprobs: Float32[np.ndarray, " T"]
    """Nats, as in `Rollout`."""
    incarnations: Int32[np.ndarray, " T"]
    steps: Int32[np.ndarray, " T"]
    """Version of the weights behind each token: incarnation and step; neither decreases."""
    finish: Finish | None = None
    """Reason of the end of the response; None if it continues."""
    reward: float | None = None
    """Reward of a finished response; None if it has not been scored."""
    scores: Annotated[tuple[RewardScore, ...], Meta(max_length=MAX_REWARD_PARTS)] = ()
    routed_experts: RoutedExperts | UnsetType = UNSET
    """Routing of prompt and response, as in `Rollout`."""

    def __post_init__(self) -> None:
        check_routing(self.routed_experts)
        check_vector("tokens", self.tokens, np.int32)
        check_vector("behavior_logprobs", self.behavior_logprobs, np.float32)
        check_vector("incarnations", self.incarnations, np.int32)
        check_vector("steps", self.steps, np.int32)
        sizes = {self.tokens.size, self.behavior_logprobs.size, self.incarnations.size, self.steps.size}
        if len(sizes) != 1:
            raise ValueError(f"a request's arrays must share one length T, got {sorted(sizes)}")
        if not 0 <= self.index < MAX_SAMPLES:
            raise ValueError(f"index must be in [0, {MAX_SAMPLES}), got {self.index}")
        for name, values in (("incarnations", self.incarnations), ("steps", self.steps)):
            if values[0] < 0 or np.any(values[1:] < values[:-1]):
                raise ValueError(f"{name} must be >= 0 and must not decrease")
        if not np.all(np.isfinite(self.behavior_logprobs)) or np.any(self.behavior_logprobs > 1e-3):
            raise ValueError("behavior_logprobs must be finite and <= 0")
        if self.finish is not None:
            check_choice("finish", self.finish, Finish)
        if self.reward is not None and (self.finish is None or not math.isfinite(self.reward)):
            raise ValueError(f"only a finished response has a reward, and it is finite; got {self.reward}")

    @property
    def versions(self) -> tuple[Version, ...]:
        """Version behind each token."""
        pairs = zip(self.incarnations.tolist(), self.steps.tolist(), strict=True)
        return tuple(Version(incarnation=i, step=s) for i, s in pairs)

    @property
    def newest(self) -> Version:
        """Version of the last token, which no other exceeds."""
        return Version(incarnation=int(self.incarnations[-1]), step=int(self.steps[-1]))


def prompt_digest(ticket: Ticket) -> str:
    """Returns a hex digest of a ticket's prompt."""
    return blake3(ticket.prompt_tokens.astype("<i4", copy=False).tobytes()).hexdigest(length=16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TicketProgress:
    """Requests of one ticket with at least one token."""

    ticket_id: str
    prompt: str
    """Digest of the ticket's prompt (`prompt_digest`)."""
    actors: Annotated[tuple[str, ...], Meta(max_length=MAX_ACTORS)]
    """Names of the actors that sampled any of it."""
    requests: Annotated[tuple[RequestProgress, ...], Meta(max_length=MAX_SAMPLES)]

    def __post_init__(self) -> None:
        if not self.actors or not self.requests:
            raise ValueError(f"progress of ticket {self.ticket_id}: expected actors and requests, got none")
        for name in self.actors:
            check_name("actor", name)
        indexes = [r.index for r in self.requests]
        if indexes != sorted(set(indexes)):
            raise ValueError(f"progress of ticket {self.ticket_id}: indexes must rise, got {indexes}")

    def fits(self, ticket: Ticket) -> bool:
        """Returns True if these can be requests of the ticket; an actor's role may store anything."""
        num_finished = sum(r.finish is not None for r in self.requests)
        return (
            self.prompt == prompt_digest(ticket)
            and num_finished < ticket.num_samples
            and all(r.index < ticket.num_requests for r in self.requests)
            and all(r.tokens.size < ticket.sampling.max_tokens + (r.finish is not None) for r in self.requests)
            and self._routing_fits(ticket.prompt_tokens.size)
        )

    def _routing_fits(self, prompt_size: int) -> bool:
        """Returns True if the routing, where a request has one, is of each token but the last, and all of one model."""
        routed = [(r, r.routed_experts) for r in self.requests if not isinstance(r.routed_experts, UnsetType)]
        return len({rows.shape[1:] for _, rows in routed}) <= 1 and all(
            len(rows) == prompt_size + r.tokens.size - 1 for r, rows in routed
        )

    @property
    def newest(self) -> Version:
        """Newest version behind any token. An actor continues only with weights that are not older."""
        return max(r.newest for r in self.requests)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(r.tokens.size for r in self.requests)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTicket(Ticket):
    """A ticket as an actor claims it."""

    progress: TicketProgress | None = None
    """Progress that other actors handed over."""

    @classmethod
    def of(cls, ticket: Ticket, progress: TicketProgress | None = None) -> "ClaimedTicket":
        """Returns the ticket with its progress, whose newest version bounds `min_version` from below."""
        fields = {field.name: getattr(ticket, field.name) for field in dataclasses.fields(Ticket)}
        if progress is not None:
            fields["min_version"] = max(ticket.min_version, progress.newest)
        return cls(**fields, progress=progress)


def progress_of(ticket: Ticket) -> TicketProgress | None:
    """Returns what other actors sampled of a ticket."""
    return ticket.progress if isinstance(ticket, ClaimedTicket) else None


def without_progress(ticket: Ticket) -> Ticket:
    """Returns the ticket as it begins anew."""
    return dataclasses.replace(ticket, progress=None) if isinstance(ticket, ClaimedTicket) else ticket
