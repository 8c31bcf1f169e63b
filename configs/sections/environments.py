"""Environments: tasks of more than one turn, or with tools."""

import dataclasses

from configs.checks import Count, CountOrZero, Positive, Reward, Seconds, check_ranges
from configs.paths import ActorCommand


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentsConfig:
    """How episodes are played; what is played is said by `prompts`. A single-turn task reads none of it."""

    max_turns: Count = 8
    """Turns of the policy in an episode; one that isn't done by then is truncated."""
    max_turn_tokens: CountOrZero = 0
    """Tokens of one turn; one that this cuts off is no action, and ends the episode. 0: what the episode has left. An
    episode has sampling.max_response_tokens, sampled and observed, and no more than the model's context."""
    truncated_reward: Reward = 0.0
    """Added to what the last turn earned, where a budget of turns or tokens ended the episode: below what losing earns,
    so that stalling is no way out of it. prompts.truncated is about verifiers alone."""
    reset_timeout_s: Seconds = 60.0
    """Seconds until a new episode's first observation; importing the environment's library comes before."""
    step_timeout_s: Seconds = 60.0
    """Seconds an environment may take to answer an action. What takes longer is killed; that earns nothing and costs
    nothing: the episode is tried again."""
    episode_timeout_s: Seconds = 3600.0
    """The same for the one step of an environment that plays itself: a whole episode, the engine's time included."""
    retries: CountOrZero = 2
    """How often an episode whose environment failed is played again, from its start; then its group is dropped."""
    max_processes: Count = 256
    """Episodes of one actor at once, each of them a process; others wait their turn. In a mixture each environment is
    sure of its part (`actor/environments/places.py`), so that one that hangs leaves the others theirs."""
    max_in_flight: CountOrZero = 0
    """Episodes that an actor has begun and not ended at once, those in their environments included, where that is to be
    more than actor.max_num_seqs: an episode that waits for its environment is not in the engine, and another can be.
    About max_num_seqs * (1 + the environment's time / the engine's), a turn; those that are ready at once wait inside
    the engine. admission.sequences bounds a window as ever, and max_processes should be as large. 0: max_num_seqs."""
    max_memory_gib: Positive = 4.0
    """Address space of one episode's process."""
    python: ActorCommand = ""
    """Interpreter of `verifiers` and of environments of your own whose libraries don't go together with the engine's:
    one of a virtual environment that has them, msgspec and jinja2. Empty: the actor's."""

    def __post_init__(self) -> None:
        check_ranges("environments", self)
