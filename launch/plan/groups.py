"""A group in virtual time: while its responses are sampled on simulated engines, and as the learner gets it."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int32

from actor.admission import Admission
from bridge.types import Ticket
from launch.plan.sim_engine import Finished, SimEngine


@dataclasses.dataclass(frozen=True, slots=True)
class ServedGroup:
    """A complete group as the learner gets it."""

    ticket: Ticket
    tokens: int
    """Prompt and response tokens of all K, which is what training costs by."""
    response_tokens: int
    tokens_by_step: dict[int, float]
    """Response tokens by the step of the weights that made them."""

    @property
    def ticket_id(self) -> str:
        """Its ticket's."""
        return self.ticket.id

    @property
    def order(self) -> int:
        """Its ticket's."""
        return self.ticket.order

    @property
    def prompt_tokens(self) -> Int32[np.ndarray, " P"]:
        """Its ticket's."""
        return self.ticket.prompt_tokens

    @property
    def min_step(self) -> int:
        """Step of the weights behind its oldest token."""
        return min(self.tokens_by_step)

    @property
    def max_step(self) -> int:
        """Step of the weights behind its newest token."""
        return max(self.tokens_by_step)

    @property
    def incarnation(self) -> int:
        """A simulated learner is never started again."""
        return 0

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns False: a simulated learner never goes back."""
        del base_steps
        return False

    @property
    def actors(self) -> frozenset[str]:
        """Simulated engines have no names, and none is fenced."""
        return frozenset()


@dataclasses.dataclass(eq=False, slots=True)
class SimActor:
    """One engine, and what its actor has in service."""

    index: int
    engine: SimEngine
    admission: Admission
    stamp: int = 0
    """Of its last entry in the calendar; older ones are void."""
    hunger: int = -1
    """Tickets it held when it last found too few; -1 when it did not."""
    is_given_up: bool = False
    """Its chips train until the round ends; what it claimed runs on the others."""


@dataclasses.dataclass(eq=False, slots=True)
class Group:
    """In progress, or complete and not trained yet."""

    ticket: Ticket
    prompt_tokens: int
    lengths: list[int]
    """Of the responses to sample."""
    attempt: int = 0
    num_started: int = 0
    running: dict[str, tuple[SimActor, str]] = dataclasses.field(default_factory=dict)
    """By request: where, and under which ticket."""
    observed_tokens: int = 0
    """What environments said in episodes that ended."""
    finished: list[Finished] = dataclasses.field(default_factory=list)
    engines: set[int] = dataclasses.field(default_factory=set)
    start_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    """By request: the weights served when it was made."""


def served(group: Group) -> ServedGroup:
    """A group as the store has it, all its responses sampled."""
    by_step: dict[int, float] = {}
    for finished in group.finished:
        for step, tokens in finished.spans:
            by_step[step] = by_step.get(step, 0.0) + tokens
    response_tokens = round(sum(by_step.values()))
    tokens = response_tokens + group.observed_tokens + group.prompt_tokens * group.ticket.num_samples
    return ServedGroup(group.ticket, tokens, response_tokens, by_step)
